"""How packed documents leak with Transformers' defaults, one test a way, and that our arguments do not.

A test that fails with "no longer leaks" is good news from the library: the rule it stands for may go.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conf.schema import Backend
from tests.recipes.models.families import (
    LENGTHS,
    alone,
    axes_of,
    build_family,
    collate,
    documents,
    logits_of,
)

DOCS = documents()
IDS = torch.tensor([[token for ids in DOCS for token in ids]])
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
TOTAL = sum(LENGTHS)


def distance(family: str, backend: Backend, train: bool = False, **arguments: Any) -> float:
    """Largest difference to each document alone, in units of the logits' size."""
    model = build_family(family, backend).train(train)
    expected = torch.cat(alone(model, DOCS))
    got = model(**{"input_ids": IDS, "position_ids": POSITIONS, "use_cache": False} | arguments).logits[0]
    return float((got - expected).abs().max() / expected.abs().max())


def four_axes(axes: int) -> dict[str, Any]:
    return {"position_ids": POSITIONS.expand(axes, 1, TOTAL)}


def dense_mask() -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ((ids[:, None] == ids) & torch.ones(TOTAL, TOTAL).tril().bool())[None, None]


LEAKS: dict[str, Callable[[], float]] = {
    "use_cache at its default": lambda: distance("llama", Backend.sdpa, use_cache=None),
    "use_cache at its default, while training": lambda: distance("llama", Backend.sdpa, train=True, use_cache=None),
    "an attention mask of ones": lambda: distance("llama", Backend.sdpa, attention_mask=torch.ones_like(IDS)),
    "an attention mask of ones, eager": lambda: distance("qwen3", Backend.eager, attention_mask=torch.ones_like(IDS)),
    "a dense bool mask, eager": lambda: distance("llama", Backend.eager, attention_mask=dense_mask()),
    "three axes, Qwen2-VL": lambda: distance("qwen2_vl", Backend.sdpa, **four_axes(3)),
    "three axes, Qwen2.5-VL": lambda: distance("qwen2_5_vl", Backend.sdpa, **four_axes(3)),
    "three axes, Qwen3-VL": lambda: distance("qwen3_vl", Backend.sdpa, **four_axes(3)),
    "one axis, Qwen2-VL": lambda: distance("qwen2_vl", Backend.sdpa),
    "one axis, Qwen2.5-VL": lambda: distance("qwen2_5_vl", Backend.sdpa),
    "a mask made without positions, GPT-OSS": lambda: distance("gpt_oss", Backend.eager),
    "a mask made without positions, OPT": lambda: distance("opt", Backend.sdpa),
    "positions alone, Mamba-2": lambda: distance("mamba2", Backend.eager),
    "positions alone, Qwen3-Next": lambda: distance("qwen3_next", Backend.sdpa),
    "positions alone, Falcon-H1": lambda: distance("falcon_h1", Backend.sdpa),
}


@torch.no_grad()
@pytest.mark.parametrize("way", LEAKS)
def test_the_library_leaks_by(way: str) -> None:
    assert LEAKS[way]() > 0.02, f"{way}: no longer leaks"


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("backend", [Backend.sdpa, Backend.eager, Backend.document_sdpa])
def test_our_arguments_do_not(family: str, backend: Backend) -> None:
    model = build_family(family, backend)
    expected = torch.cat(alone(model, DOCS))
    got = logits_of(model, collate(DOCS), axes_of(family))[0, :TOTAL]
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cache": None},
        {"attention_mask": torch.ones_like(IDS)},
        {"position_ids": POSITIONS.expand(3, 1, TOTAL)},
        {"position_ids": POSITIONS},
    ],
    ids=["cache", "mask of ones", "three axes", "one axis"],
)
def test_document_sdpa_is_right_with_these_defaults_too(arguments: dict[str, Any]) -> None:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    family = "qwen2_vl" if "position_ids" in arguments else "llama"
    assert distance(family, Backend.document_sdpa, cu_seq_lens_q=bounds, **arguments) < 1e-5


@torch.no_grad()
def test_adjacent_documents_whose_positions_continue_are_taken_for_one() -> None:
    model = build_family("llama", Backend.sdpa)
    positions = torch.arange(TOTAL)[None]
    got = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    assert torch.equal(got, model(input_ids=IDS, use_cache=False).logits)


@torch.no_grad()
def test_lengths_without_seq_idx_are_not_enough_for_recurrent_layers() -> None:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    for family in ("mamba2", "falcon_h1"):
        assert distance(family, Backend.eager, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds) > 0.02, family
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):  # this one says so itself
        distance("qwen3_next", Backend.eager, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
