"""Documents of one packed row do not see each other, bit for bit: every family on every backend declared sound."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.schema import Backend, Layout, Scope
from datum import Datum, collate_datums, pack_features_for_thd, packed_sequence_thd_collater
from recipes.models.backends import AUTO_ORDER, unsound
from recipes.models.scoring import ScoringModel
from recipes.models.traits import read_traits
from tests.recipes.models.families import (
    LENGTHS,
    MOE,
    MROPE,
    alone,
    axes_of,
    build_family,
    collate,
    documents,
    logits_of,
)

ATTENTION_ONLY = ("llama", "qwen3", "mistral", "gemma3", "gemma2", "qwen3_moe", "qwen2_moe", "gpt2", "granite", *MROPE)
CHANGED, WATCHED = 1, 3  # documents


def sound_pairs() -> list[tuple[str, Backend]]:
    pairs = []
    for family in ATTENTION_ONLY:
        traits = read_traits(build_family(family))
        pairs += [(family, b) for b in AUTO_ORDER if unsound(b, traits, Layout.packed, "cpu") is None]
    return [*pairs, ("opt", Backend.document_sdpa)]


PAIRS = sound_pairs()


def place(document: int) -> slice:
    ends = [0, *accumulate(LENGTHS)]
    return slice(ends[document], ends[document + 1])


def changed(docs: list[list[int]]) -> list[list[int]]:
    """The same documents but for one, every token of which is another."""
    return [[3 + (token - 2) % 40 for token in ids] if i == CHANGED else ids for i, ids in enumerate(docs)]


def watched_gradients(
    model: PreTrainedModel, family: str, backend: Backend, docs: list[list[int]]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logprobs of the watched document, the gradients of its loss, and the gradient by each position's embedding."""
    scoring = ScoringModel(model, backend=backend, axes=axes_of(family))
    batch = collate(docs)
    selected = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    selected[0, place(WATCHED)] = True
    embeddings: list[Tensor] = []

    def keep(_module: torch.nn.Module, _arguments: tuple, output: Tensor) -> None:
        output.retain_grad()
        embeddings.append(output)

    handle = model.get_input_embeddings().register_forward_hook(keep)
    model.zero_grad()
    logprobs = scoring(batch, torch.full_like(batch["input_ids"], 7), selected).logprobs
    logprobs.sum().backward()
    handle.remove()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert embeddings[0].grad is not None
    return logprobs.detach(), gradients, embeddings[0].grad[0]


@pytest.mark.parametrize(("family", "backend"), PAIRS)
def test_another_document_changes_neither_logits_nor_gradients(family: str, backend: Backend) -> None:
    docs = documents()
    model = build_family(family, backend)
    axes = axes_of(family)
    with torch.no_grad():
        before, after = (logits_of(model, collate(d), axes)[0, place(WATCHED)] for d in (docs, changed(docs)))
    logprobs, gradients, by_embedding = watched_gradients(model, family, backend, docs)
    logprobs_after, gradients_after, _ = watched_gradients(model, family, backend, changed(docs))
    others = torch.ones(len(by_embedding), dtype=torch.bool)
    others[place(WATCHED)] = False
    assert not by_embedding[others].any()
    assert by_embedding[~others].any(-1).all()
    if family in MOE:  # the other tokens' experts get batches of another shape
        size = before.abs().max()
        assert (before - after).abs().max() <= 1e-6 * size
        for name, gradient in gradients.items():
            assert (gradient - gradients_after[name]).norm() <= 1e-6 * max(1e-3, float(gradient.norm())), name
        return
    assert torch.equal(before, after)
    assert torch.equal(logprobs, logprobs_after)
    assert gradients.keys() == gradients_after.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_after[name]), name


@torch.no_grad()
@pytest.mark.parametrize(("family", "backend"), PAIRS)
@pytest.mark.parametrize("packed", [True, False])
def test_a_document_among_others_equals_the_document_alone(family: str, backend: Backend, packed: bool) -> None:
    docs = documents()
    model = build_family(family, backend)
    logits = logits_of(model, collate(docs, packed=packed), axes_of(family))
    for index, expected in enumerate(alone(build_family(family, Backend.eager), docs)):
        got = logits[0, place(index)] if packed else logits[index, : LENGTHS[index]]
        assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), index


@torch.no_grad()
@pytest.mark.parametrize(("family", "backend"), [p for p in PAIRS if p[0] in ("llama", "gemma3", "qwen2_vl")])
def test_several_packed_rows_in_one_batch(family: str, backend: Backend) -> None:
    docs = documents((5, 3, 3, 6, 8, 2))
    rows = [docs[:3], docs[3:5], docs[5:]]
    packs = [pack_features_for_thd([Datum(ids).to_features() for ids in row]) for row in rows]
    model = build_family(family, backend)
    logits = logits_of(model, packed_sequence_thd_collater(packs), axes_of(family))
    for row, row_logits in zip(rows, logits):
        parts = row_logits[: sum(map(len, row))].split([len(ids) for ids in row])
        for part, expected in zip(parts, alone(model, row)):
            assert (part - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(("family", "backend"), PAIRS)
def test_xdoc_is_one_plain_sequence(family: str, backend: Backend) -> None:
    docs = documents()
    model = build_family(family, backend)
    joined = [token for ids in docs for token in ids]
    got = logits_of(model, collate(docs), axes_of(family), Scope.xdoc)[0, : len(joined)]
    expected = alone(model, [joined])[0]
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    separate = logits_of(model, collate(docs), axes_of(family))[0, : len(joined)]
    assert (got - separate)[place(WATCHED)].abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "falcon_h1"])
def test_recurrent_models_with_one_document_a_row(family: str) -> None:
    docs = documents()
    model = build_family(family)
    logits = logits_of(model, collate(docs, packed=False))
    for index, expected in enumerate(alone(model, docs)):
        got = logits[index, : LENGTHS[index]]
        assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), index


def test_the_end_of_a_padded_row_gets_no_gradient() -> None:
    model = build_family("mistral", Backend.document_sdpa)
    batch = collate_datums([Datum([5, 6, 7]), Datum([8, 9, 10, 11, 12, 13, 14])])
    logits = logits_of(model, batch)
    (logits * batch["attention_mask"][..., None]).square().sum().backward()
    assert not model.get_input_embeddings().weight.grad[0].any()  # padding is filled with id 0
