"""ScoringModel: the head as it is read equals the model's own logits, and selection changes nothing but the work."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import Backend, Dtype, Layout, LoraConfig, PositionAxes, Scope
from datum import Datum, collate_datums
from recipes.losses.aggregate import select_tokens
from recipes.models.head import Head, read_head
from recipes.models.inputs import model_inputs
from recipes.models.scoring import ScoringModel, score_logits
from tests.recipes.models.families import (
    MOE,
    axes_of,
    build,
    build_family,
    collate,
    documents,
    family_config,
)

READ = {
    "llama": Head(),
    "gemma2": Head(softcap=3.0),
    "gemma3": Head(),
    "cohere": Head(scale=0.125),
    "granite": Head(scale=0.25),
    "gpt2": Head(),
    "qwen3_moe": Head(),
    "falcon_h1": Head(scale=0.5),
    "qwen2_vl": Head(),
}


def selection(batch: dict[str, Any], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets of a batch and a random half of its positions."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, 50, batch["input_ids"].shape, generator=generator)
    return targets, torch.rand(targets.shape, generator=generator) < 0.5


@pytest.mark.parametrize("family", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_read(family: str, dtype: torch.dtype) -> None:
    assert read_head(build_family(family).to(dtype)) == READ[family]


@pytest.mark.parametrize("family", [*READ, "bert"])
def test_scores_and_gradients_equal_those_of_full_logits(family: str) -> None:
    model = build_family(family)
    scoring = ScoringModel(model, backend=Backend.eager, axes=axes_of(family))
    assert (scoring.head is None) == (family == "bert")
    batch = collate(documents(), packed=False)
    targets, selected = selection(batch)
    options: dict[str, Any] = {"temperature": 0.7, "entropy": True}
    inputs = model_inputs(batch, backend=Backend.eager, axes=axes_of(family))
    results = []
    for full in (False, True):
        model.zero_grad()
        if full:
            scores = score_logits(model(**inputs).logits[selected], targets[selected], **options)
        else:
            scores = scoring(batch, targets, selected, **options)
        (scores.logprobs.sum() + 0.5 * scores.entropy.sum()).backward()
        results.append((scores, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (scores, gradients), (expected, expected_gradients) = results
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    assert torch.equal(scores.is_argmax, expected.is_argmax)
    torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy, expected.entropy, rtol=0, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    total = torch.cat([g.flatten() for g in expected_gradients.values()]).norm()
    for name, gradient in gradients.items():
        error = (gradient - expected_gradients[name]).norm()
        assert error <= 1e-5 * max(expected_gradients[name].norm(), 1e-3 * total), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert"])
def test_the_gradient_formed_in_the_forward_pass_is_the_same(family: str) -> None:
    model = build_family(family)
    scoring = ScoringModel(model, backend=Backend.eager)
    batch = collate(documents(), packed=False)
    targets, selected = selection(batch)
    coefficients = torch.linspace(-1, 2, int(selected.sum()))
    gradients = []
    for linear in (True, False):
        model.zero_grad()
        if linear:
            scores = scoring(batch, targets, selected, coefficients=coefficients)
            assert not scores.logprobs.requires_grad
            assert scores.weighted_sum.dtype == torch.float64
            scores.weighted_sum.backward()
        else:
            (scoring(batch, targets, selected).logprobs * coefficients).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 1e-5 * max(1e-3, float(gradients[1][name].norm())), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "bert"])
@pytest.mark.parametrize("linear", [True, False])
def test_without_a_selected_position_every_parameter_gets_a_gradient_of_zeros(family: str, linear: bool) -> None:
    model = build_family(family)
    scoring = ScoringModel(model, backend=Backend.eager)
    batch = collate(documents(), packed=False)
    selected = torch.zeros_like(batch["input_ids"]).bool()
    scores = scoring(batch, batch["input_ids"], selected, coefficients=torch.zeros(0) if linear else None)
    loss = scores.weighted_sum if linear else scores.logprobs.sum()
    assert loss == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt2", "qwen2_vl"])
def test_padded_packed_and_single_give_the_same_loss_and_gradients(family: str) -> None:
    ids = documents()
    datums = [
        Datum(row, loss_fn_inputs={"target_tokens": [(t + 1) % 50 for t in row], "weights": [1.0] * len(row)})
        for row in ids
    ]
    results = []
    for packed, groups in ((True, [datums]), (False, [datums]), (False, [[d] for d in datums])):
        layout = Layout.packed if packed else Layout.padded
        built = build(family_config(family), layout=layout, axes=axes_of(family))
        loss = torch.zeros((), dtype=torch.float64)
        for group in groups:
            batch = collate_datums(group, packed=packed)
            tokens, selected, targets = select_tokens(batch)
            loss = loss - built.scoring(batch, targets, selected, coefficients=tokens.weights).weighted_sum
        (loss / len(ids)).backward()
        gradients = {n: p.grad for n, p in built.scoring.named_parameters() if p.grad is not None}
        results.append((float(loss.detach()) / sum(map(len, ids)), gradients))
    expected_loss, expected = results[0]
    everything = torch.cat([g.flatten() for g in expected.values()]).norm()
    for loss, gradients in results[1:]:
        assert abs(loss - expected_loss) <= 1e-6 * max(1, abs(expected_loss))
        for name, gradient in gradients.items():
            bound = 1e-5 * max(float(expected[name].norm()), 1e-3 * float(everything))
            assert (gradient - expected[name]).norm() <= bound * (10 if family in MOE else 1), name


def test_inputs_that_are_ready_are_taken_as_they_are() -> None:
    scoring = ScoringModel(build_family("llama"), backend=Backend.eager, scope=Scope.xdoc)
    batch = collate(documents())
    targets, selected = selection(batch)
    inputs = model_inputs(batch, backend=Backend.eager, scope=Scope.xdoc, axes=PositionAxes.rope)
    assert torch.equal(scoring(inputs, targets, selected).logprobs, scoring(batch, targets, selected).logprobs)


def test_what_a_head_hides_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    assert "Sequential, not a plain torch.nn.Linear" in str(read_head(model))

    squared = build_family("llama")
    squared.lm_head.register_forward_hook(lambda _module, _arguments, output: output + 0.01 * output.square())
    assert "treats its logits in a way that is not known here" in str(read_head(squared))

    shifted = build_family("llama")
    shifted.lm_head.register_forward_pre_hook(lambda _module, arguments: (arguments[0] * 1.01,))
    assert "changes hidden states between its body and its head" in str(read_head(shifted))

    # A cap that the configuration does not give shows in large logits alone.
    capped = build_family("gemma2")
    capped.config.final_logit_softcapping = None
    assert read_head(capped) == Head()
    monkeypatch.setattr("recipes.models.head._CAPS", ())
    assert "not known here" in str(read_head(build_family("gemma2")))


def test_a_model_is_scored_in_the_mode_that_it_is_in_and_probed_without_a_trace() -> None:
    model = build_family("gpt2").train()
    state = torch.get_rng_state()
    scoring = ScoringModel(model, backend=Backend.eager)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not model.lm_head._forward_pre_hooks
    assert all(p.grad is None for p in scoring.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_bf16_autocast_is_near_and_gives_float32(family: str) -> None:
    built = build(family_config(family), layout=Layout.packed)
    batch = collate(documents())
    targets, selected = selection(batch)
    exact = built.scoring(batch, targets, selected).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        rounded = built.scoring(batch, targets, selected).logprobs
        built.scoring(batch, targets, selected, coefficients=torch.ones_like(rounded)).weighted_sum.backward()
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().median() < 0.3
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in built.scoring.parameters())


def test_bf16_parameters_give_float32_scores() -> None:
    built = build(family_config("llama", dtype=Dtype.bfloat16, lora=LoraConfig(rank=2)), layout=Layout.packed)
    batch = collate(documents())
    targets, selected = selection(batch)
    logprobs = built.scoring(batch, targets, selected).logprobs
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert all(p.grad is not None for p in built.scoring.parameters() if p.requires_grad)
