"""One step: the same loss and the same gradient in every layout, split, order, accumulation and number of ranks."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import Aggregation, Backend
from datum import Datum, collate_datums
from recipes.losses.aggregate import Tokens
from recipes.losses.cross_entropy import CrossEntropy
from recipes.losses.loss import Loss
from recipes.models.scoring import ScoringModel
from recipes.training.step import Batch, StepResult, train_step

VOCAB = 23
MODES = [("token", None), ("sequence", None), ("constant", 7), ("sum", None)]


class Surrogate:
    """-exp(p - b) A: not linear in p, with one value a token and one a sequence."""

    linear = False
    linear_scale = 0.0
    required_fields = ("logprobs", "advantages")
    needs_entropy = False
    temperature = 0.7

    def __init__(self, aggregation: str = "token", max_tokens: int | None = None):
        self.aggregation, self.max_tokens = Aggregation(aggregation), max_tokens

    def __call__(self, target_logprobs: Tensor, tokens: Tokens) -> Tensor:
        return -torch.exp(target_logprobs - tokens.get("logprobs")) * tokens.get("advantages")


def tiny(backend: Backend = Backend.document_sdpa) -> ScoringModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    import recipes.models.attention  # noqa: F401  (registers document_sdpa)

    model = LlamaForCausalLM(config)
    model.set_attn_implementation(backend.value)
    return ScoringModel(model, backend=backend)


MODEL = tiny()

datum_lists = st.lists(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n),
            st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n),
            st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.0, -0.5]), min_size=n, max_size=n),
            st.floats(-2, 2, width=32),
        )
    ),
    min_size=1,
    max_size=7,
)


def make(raw: Sequence[tuple]) -> list[Datum]:
    return [
        Datum(
            ids, {"target_tokens": targets, "weights": weights, "logprobs": [-3.0] * len(ids), "advantages": advantage}
        )
        for ids, targets, weights, advantage in raw
    ]


def gradients(microbatches: list[Batch], loss: Loss) -> tuple[StepResult, dict[str, Tensor]]:
    """Loss and clipped gradient of a step, read off the update of an SGD of rate 1."""
    before = {name: p.detach().clone() for name, p in MODEL.named_parameters()}
    optimizer = Keep(MODEL.parameters())
    result = train_step(MODEL, microbatches, loss, optimizer)
    assert all(torch.equal(before[name], p) for name, p in MODEL.named_parameters())
    return result, {name: optimizer.seen.get(p, torch.zeros_like(p)) for name, p in MODEL.named_parameters()}


class Keep(torch.optim.Optimizer):
    """Keeps gradients instead of applying them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.seen: dict[Tensor, Tensor] = {}

    def step(self, closure=None):
        self.seen = {p: p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}


def assert_same(one: tuple[StepResult, dict[str, Tensor]], other: tuple[StepResult, dict[str, Tensor]]) -> None:
    (mine, g), (theirs, h) = one, other
    assert mine.weight_total == pytest.approx(theirs.weight_total)
    assert mine.tokens == theirs.tokens
    assert (mine.loss is None) == (theirs.loss is None)
    if mine.loss is None:
        return
    assert abs(mine.loss - theirs.loss) <= 1e-6 * max(1, abs(mine.loss))
    whole = torch.sqrt(sum(value.square().sum() for value in g.values()))
    for name, value in g.items():
        assert (value - h[name]).norm() <= 1e-5 * max(value.norm(), 1e-3 * whole) + 1e-12, name


@given(raw=datum_lists, mode=st.sampled_from(MODES), data=st.data(), kind=st.sampled_from([CrossEntropy, Surrogate]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_layout_split_order_and_accumulation_change_nothing(raw, mode, data, kind) -> None:
    datums = make(raw)
    loss = kind(*mode)
    whole = gradients([collate_datums(datums)], loss)
    order = data.draw(st.permutations(range(len(datums))))
    cut = data.draw(st.integers(0, len(datums)))
    shuffled = [datums[i] for i in order]
    groups = [group for group in (shuffled[:cut], shuffled[cut:]) if group]
    layouts = {
        "packed": [collate_datums(datums, packed=True)],
        "one by one": [collate_datums([datum]) for datum in shuffled],
        "padded to a multiple": [collate_datums(datums, pad_seq_len_divisible=8)],
        "packed to a multiple": [collate_datums(datums, packed=True, pad_seq_len_divisible=8)],
        "split": [collate_datums(group) for group in groups],
        "split and packed": [collate_datums(group, packed=True) for group in groups],
    }
    for microbatches in layouts.values():
        assert_same(whole, gradients(microbatches, loss))


def uniform(lengths: Sequence[int], weights: Sequence[float] | None = None) -> list[Datum]:
    make_weights = weights if weights is not None else [1.0] * len(lengths)
    return [
        Datum(list(range(n)), {"target_tokens": list(range(1, n + 1)), "weights": [w] * n})
        for n, w in zip(lengths, make_weights, strict=True)
    ]


def test_token_mean_is_not_a_mean_of_microbatch_means() -> None:
    one, three = uniform([1]), uniform([3])
    parts = [gradients([collate_datums(part)], CrossEntropy())[0].loss for part in (one, three)]
    together = gradients([collate_datums(one), collate_datums(three)], CrossEntropy())[0].loss
    assert together == pytest.approx((parts[0] + 3 * parts[1]) / 4, abs=1e-6)
    assert abs(together - sum(parts) / 2) > 1e-3


def test_scaling_all_weights_leaves_the_mean_and_scales_the_sum() -> None:
    plain, scaled = uniform([4, 2]), uniform([4, 2], [1 / 64, 1 / 64])
    mean = [gradients([collate_datums(d)], CrossEntropy())[0].loss for d in (plain, scaled)]
    total = [gradients([collate_datums(d)], CrossEntropy("sum"))[0].loss for d in (plain, scaled)]
    assert mean[0] == pytest.approx(mean[1], abs=1e-6)
    assert total[0] == pytest.approx(64 * total[1], rel=1e-6)


def test_a_step_without_weight_moves_nothing() -> None:
    result, _ = gradients([collate_datums(uniform([3, 2], [0.0, 0.0]))], CrossEntropy())
    assert result.loss is None
    assert not result.updated
    assert result.is_finite
    assert result.tokens == 5


@pytest.mark.parametrize("loss", [CrossEntropy(), Surrogate()])
def test_a_microbatch_without_weight_contributes_nothing(loss: Loss) -> None:
    full = make([([1, 2, 3], [2, 3, 4], [1.0, 1.0, 1.0], 0.5)])
    empty = make([([5, 6], [6, 7], [0.0, 0.0], 0.5)])
    alone = gradients([collate_datums(full)], loss)
    both = gradients([collate_datums(full), collate_datums(empty)], loss)
    assert both[0].loss == pytest.approx(alone[0].loss, abs=1e-7)
    for name, value in alone[1].items():
        assert torch.allclose(value, both[1][name], atol=1e-7)


def test_non_finite_gradient_leaves_parameters_alone() -> None:
    model = tiny()
    with torch.no_grad():
        model.hf.lm_head.weight[0, 0] = float("inf")
    before = model.hf.model.norm.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    result = train_step(model, [collate_datums(uniform([4]))], CrossEntropy(), optimizer)
    assert not result.is_finite
    assert not result.updated
    assert torch.equal(model.hf.model.norm.weight, before)
    assert all(p.grad is None for p in model.parameters())


def test_grad_norm_is_measured_before_clipping() -> None:
    model = tiny()
    batch = [collate_datums(uniform([5, 3]))]
    optimizer = Keep(model.parameters())
    free = train_step(model, batch, CrossEntropy(), optimizer)
    whole = torch.sqrt(sum(g.square().sum() for g in optimizer.seen.values()))
    assert free.grad_norm == pytest.approx(float(whole), rel=1e-5)
    clipped = train_step(model, batch, CrossEntropy(), optimizer, grad_clip=0.01)
    kept = torch.sqrt(sum(g.square().sum() for g in optimizer.seen.values()))
    assert clipped.grad_norm == pytest.approx(free.grad_norm, rel=1e-6)
    assert float(kept) == pytest.approx(0.01, rel=1e-3)


def test_missing_field_names_it() -> None:
    with pytest.raises(ValueError, match="'logprobs'"):
        gradients([collate_datums(uniform([3]))], Surrogate())


@pytest.mark.multiproc
@pytest.mark.parametrize("packed", [False, True])
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path, packed: bool) -> None:
    results = {}
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run = subprocess.run(
            [*command, "-m", "tests.recipes.training.rank_worker", str(out), str(int(packed))],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=Path(__file__).parents[3],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert out.exists(), run.stderr
        results[ranks] = torch.load(out, weights_only=True)
    for name in results[1]:
        for one, other in zip(results[1][name]["steps"], results[2][name]["steps"], strict=True):
            assert one[0] == pytest.approx(other[0], abs=1e-6)
            assert one[1] == pytest.approx(other[1], rel=1e-5)
            assert one[2] == other[2]
        g, h = results[1][name]["gradients"], results[2][name]["gradients"]
        whole = torch.sqrt(sum(value.square().sum() for value in g.values()))
        for key, value in g.items():
            assert (value - h[key]).norm() <= 1e-5 * max(value.norm(), 1e-3 * whole), (name, key)
