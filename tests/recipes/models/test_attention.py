"""document_sdpa as a function: against plain attention with a dense mask, in float64, for any documents and windows."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from conf.schema import Backend
from recipes.models.attention import Segments, document_mask, document_sdpa
from recipes.models.errors import ModelError
from tests.recipes.models.families import LENGTHS, build_family, collate, documents, logits_of

LAYER = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=False)


def reference(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, window: int | None) -> Tensor:
    """Softmax over a dense mask [B, S, S]: same document, not later, within the window."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    at = torch.arange(query.shape[2])
    mask = (ids[:, :, None] == ids[:, None, :]) & (at[:, None] >= at)
    if window is not None:
        mask &= at > at[:, None] - window
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~mask[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def mask_for(rows: int, width: int, window: int | None, attention_mask: Tensor | None = None) -> Tensor | None:
    pattern = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return document_mask(rows, width, width, mask_function=pattern, local_size=window, attention_mask=attention_mask)


def random_qkv(rows: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    shapes = ((rows, 4, width, 8), (rows, 2, width, 8), (rows, 2, width, 8))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Rows, their width, and segments that cover them without crossing from one into the next."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    lengths: list[int] = []
    for _ in range(rows):
        cuts = sorted(draw(st.sets(st.integers(1, width - 1), max_size=5))) if width > 1 else []
        lengths += [b - a for a, b in zip([0, *cuts], [*cuts, width])]
    return rows, width, lengths


@settings(max_examples=60)
@given(packed_rows(), st.none() | st.integers(1, 9))
def test_output_and_gradients_equal_attention_with_a_dense_mask(
    case: tuple[int, int, list[int]], window: int | None
) -> None:
    rows, width, lengths = case
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(rows, width)
    cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    inputs, again = random_qkv(rows, width), random_qkv(rows, width)
    output, _ = document_sdpa(LAYER, *inputs, mask_for(rows, width, window), cu_seq_lens_q=cu_seq_lens)
    expected = reference(*again, ids, window)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weight = torch.arange(output.numel(), dtype=torch.float64).view_as(output).sin()
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for got, wanted in zip(inputs, again):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [3, 300, 700])
def test_windows_longer_and_shorter_than_a_chunk_of_queries(window: int) -> None:
    width = 1100
    inputs = random_qkv(1, width)
    output, _ = document_sdpa(LAYER, *inputs, mask_for(1, width, window))
    torch.testing.assert_close(output, reference(*inputs, torch.zeros(1, width), window), rtol=0, atol=1e-12)


def test_padding_on_the_right_needs_no_mask_and_padding_on_the_left_gets_one() -> None:
    right, left = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool(), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert mask_for(2, 4, None, right) is None
    dense = mask_for(2, 4, None, left)
    assert dense is not None
    assert dense[0, 0].tolist() == [[False] * 4] + [[False] + [j <= i for j in range(3)] for i in range(3)]
    windowed = mask_for(2, 4, 2, right)
    assert windowed is not None
    assert windowed.untyped_storage().nbytes() == 1


def test_segments_are_read_off_a_tensor_once() -> None:
    cu_seq_lens = torch.tensor([0, 3, 3, 5, 8], dtype=torch.int32)
    first = Segments.read(cu_seq_lens, 1, 8)
    assert first.lengths == (3, 2, 3)
    assert Segments.read(cu_seq_lens, 1, 8) is first


@pytest.mark.parametrize("bounds", [[0, 3, 7], [1, 3, 8], [0, 5, 3, 8], [0, 6, 8]])
def test_cumulative_lengths_that_do_not_cover_the_rows_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ModelError, match=r"cu_seq_lens_q is \[.* for 2 rows of 4: it must rise from 0 to 8"):
        Segments.read(torch.tensor(bounds), 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softcap": 30.0}, "cannot compute soft-capping of attention scores; use attention.backend=eager"),
        ({"s_aux": torch.zeros(4)}, "cannot compute attention sinks"),
        ({"attention_mask": torch.ones(1, 1, 6, 6).tril().bool()}, "packed rows and a mask of the model's own"),
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "packed rows and a bias by position"),
        ({"is_causal": False}, "packed rows and attention that is not causal self-attention"),
    ],
)
def test_what_it_cannot_compute_is_refused(arguments: dict, message: str) -> None:
    options = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 4, 6])} | arguments
    with pytest.raises(ModelError, match=message):
        document_sdpa(LAYER, *random_qkv(1, 6), **options)


def test_packed_rows_without_lengths_or_with_a_cache_are_refused() -> None:
    model = build_family("llama", Backend.document_sdpa)
    ids, restarting = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ModelError, match="position_ids that restart within a row, but without cu_seq_lens_q"):
        model(input_ids=ids, position_ids=restarting, use_cache=False)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ModelError, match="or a cache: pass use_cache=False"):
        model(input_ids=ids, cache=cache, cu_seq_lens_q=torch.tensor([0, 2, 4]))


def test_a_model_that_edits_its_mask_is_refused() -> None:
    stand_in = mask_for(1, 6, 2)
    assert stand_in is not None
    with pytest.raises(ModelError, match="edits its mask"):
        document_sdpa(LAYER, *random_qkv(1, 6), stand_in[:, :, :, :6])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_generation_equals_sdpa_padding_on_the_left_included(family: str) -> None:
    prompts = documents((3, 9, 6))
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    tokens, scores = [], []
    for backend in (Backend.sdpa, Backend.document_sdpa):
        model = build_family(family, backend)
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        made = model.generate(ids, attention_mask=mask, **options, output_logits=True, return_dict_in_generate=True)
        tokens.append(made.sequences)
        scores.append(torch.stack(made.logits))
    assert torch.equal(*tokens)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("packed", [True, False])
def test_gradient_checkpointing_changes_no_gradient(family: str, packed: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = build_family(family, Backend.document_sdpa).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        batch = collate(documents(), packed=packed)
        logits_of(model, batch)[:, : sum(LENGTHS)].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_switching_backends_at_run_time() -> None:
    model = build_family("mistral", Backend.document_sdpa)
    batch = collate(documents())
    first = logits_of(model, batch)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits_of(model, batch)[:, : sum(LENGTHS)], first[:, : sum(LENGTHS)], rtol=0, atol=2e-5)
