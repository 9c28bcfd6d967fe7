"""The soundness table, the choice of `auto`, and what gives a model away that the table does not know."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from conf.schema import Backend, Layout, PositionAxes, Scope
from recipes.models.backends import AUTO_ORDER, RULES, candidates, unsound
from recipes.models.errors import ModelError
from recipes.models.probe import find_leak, find_unused_parts
from recipes.models.traits import Traits, read_traits
from tests.recipes.models.families import FAMILIES, MOE, MROPE, RECURRENT, axes_of, build, build_family, family_config

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_traits(family: str) -> None:
    traits = read_traits(build_family(family))
    assert (traits.recurrent is not None) == (family in RECURRENT)
    assert traits.has_mrope == (family in MROPE)
    assert traits.is_moe == (family in MOE)
    assert traits.has_windows == (family in ("mistral", "gemma2", "gemma3", "qwen2_moe", "gpt_oss"))
    assert traits.has_softcap == (family == "gemma2")
    assert traits.has_sinks == (family == "gpt_oss")
    assert traits.other_layers == ()
    if traits.has_windows:
        assert traits.passes_windows == (family != "qwen2_moe")


ANY = Traits("Any")
TABLE = [
    # backend, traits, layout, device, part of the reason
    (Backend.flex_attention, ANY, Layout.packed, "cpu", "it trains on CUDA alone"),
    (Backend.flash_attention_2, ANY, Layout.padded, "cpu", "it trains on CUDA alone"),
    (Backend.flash_attention_2, ANY, Layout.packed, "cuda", "pip install flash-attn"),
    (Backend.flash_attention_2, replace(ANY, has_windows=True, passes_windows=False), Layout.packed, "cuda", "window"),
    (Backend.flex_attention, ANY, Layout.packed, "cuda", None),
    (Backend.document_sdpa, replace(ANY, has_softcap=True), Layout.padded, "cpu", "use attention.backend=eager"),
    (Backend.document_sdpa, replace(ANY, has_sinks=True), Layout.packed, "cpu", "no attention sinks"),
    (Backend.document_sdpa, replace(ANY, has_chunks=True), Layout.packed, "cpu", "no chunked attention"),
    (Backend.sdpa, replace(ANY, has_chunks=True), Layout.packed, "cpu", None),
    (Backend.eager, replace(ANY, has_softcap=True), Layout.packed, "cpu", None),
    (Backend.eager, replace(ANY, recurrent="layers"), Layout.packed, "cpu", "use collate=padded"),
    (Backend.eager, replace(ANY, recurrent="layers"), Layout.padded, "cpu", None),
    (Backend.eager, replace(ANY, other_layers=("indexed_attention",)), Layout.packed, "cpu", "use collate=padded"),
    (Backend.sdpa, replace(ANY, supported=frozenset({Backend.eager})), Layout.padded, "cpu", "it has eager"),
]


@pytest.mark.parametrize(("backend", "traits", "layout", "device", "reason"), TABLE)
def test_table(backend: Backend, traits: Traits, layout: Layout, device: str, reason: str | None) -> None:
    found = unsound(backend, traits, layout, device)
    if reason is None:
        assert found is None
        return
    assert found is not None
    assert reason in found
    with pytest.raises(ModelError, match=f"attention.backend={backend.value}, collate={layout.value} on {device}"):
        candidates(backend, traits, layout, device)


def test_auto_falls_back_and_says_why() -> None:
    sound, out = candidates(Backend.auto, replace(ANY, has_softcap=True), Layout.packed, "cpu")
    assert sound == [Backend.eager]
    assert set(out) == {Backend.document_sdpa, Backend.sdpa}
    assert candidates(Backend.auto, ANY, Layout.padded, "cpu")[0] == list(AUTO_ORDER)


def test_the_page_has_every_rule() -> None:
    text = " ".join(DOCS.read_text().split())
    for rule in RULES:
        assert rule.reason in text


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("llama", "document_sdpa"),
        ("gemma3", "document_sdpa"),
        ("qwen2_moe", "document_sdpa"),
        ("opt", "document_sdpa"),
        ("gemma2", "eager"),
    ],
)
def test_auto_for_packed_rows(family: str, chosen: str) -> None:
    built = build(family_config(family), layout=Layout.packed)
    assert built.backend == chosen
    assert len(built.notes) == (2 if chosen == "eager" else 0)
    if chosen == "eager":
        assert built.notes[0].startswith("attention.backend=document_sdpa is passed over: it cannot soft-cap")


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_models_are_refused_for_packing_and_take_one_document_a_row(family: str) -> None:
    with pytest.raises(ModelError, match=r"not sound for .*ForCausalLM \(.*\): recurrent and convolution layers carry"):
        build(family_config(family), layout=Layout.packed)
    assert build(family_config(family), layout=Layout.padded).backend in ("eager", "document_sdpa")


@pytest.mark.parametrize(("family", "backend"), [("gpt_oss", Backend.auto), ("opt", Backend.sdpa)])
def test_models_that_make_their_mask_without_positions_are_found_out(family: str, backend: Backend) -> None:
    with pytest.raises(ModelError, match="documents of one packed row see each other"):
        build(family_config(family), layout=Layout.packed, backend=backend)


def test_positions_that_the_model_does_not_have_or_that_leak() -> None:
    with pytest.raises(ModelError, match="positions=mrope: LlamaForCausalLM has one rotary axis; use positions=rope"):
        build(family_config("llama"), axes=PositionAxes.mrope)
    with pytest.raises(ModelError, match=r"see each other .*use positions=mrope"):
        build(family_config("qwen2_vl"), layout=Layout.packed, backend=Backend.sdpa)
    for family in MROPE:
        for axes in PositionAxes:
            assert build(family_config(family), layout=Layout.packed, axes=axes).backend == "document_sdpa"


def test_a_model_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ModelError, match="this is not a causal language model"):
        build(family_config("bert"))


class Accumulating(nn.Module):
    """Adds a running sum of all earlier tokens: recurrence that neither class names nor configuration show."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden_states) + hidden_states.cumsum(1)


def test_hidden_recurrence_is_found_by_trying() -> None:
    model = build_family("llama", Backend.document_sdpa)
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[1].mlp = Accumulating(model.model.layers[1].mlp)
    assert read_traits(model).recurrent is None
    options = {"backend": Backend.document_sdpa, "scope": Scope.per_document, "axes": PositionAxes.rope}
    assert find_leak(model, layout=Layout.packed, **options) == "documents of one packed row see each other"
    assert find_leak(model, layout=Layout.padded, **options) is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "qwen3_vl"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trying_finds_nothing_in_sound_models(family: str, layout: Layout, dtype: torch.dtype) -> None:
    model = build_family(family, Backend.document_sdpa).to(dtype)
    for scope in Scope if layout == Layout.packed else [Scope.per_document]:
        found = find_leak(model, backend=Backend.document_sdpa, layout=layout, scope=scope, axes=axes_of(family))
        assert found is None


def test_parts_that_text_does_not_reach() -> None:
    assert find_unused_parts(build_family("llama")) == []
    for family in MROPE:
        assert find_unused_parts(build_family(family)) == ["model.visual"]
