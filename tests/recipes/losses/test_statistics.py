"""What a step says about itself: worked by hand, over microbatches and ranks, and at the edges."""

import math
import multiprocessing
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.losses import statistics
from recipes.losses.aggregate import Tokens
from recipes.losses.cispo import CISPO
from recipes.losses.dro import DRO
from recipes.losses.gspo import GSPO
from recipes.losses.importance_sampling import ImportanceSampling
from recipes.losses.logprobs import TokenScores
from recipes.losses.ppo import PPO
from recipes.losses.statistics import PolicyStatistics

NAMES = {
    "ratio/mean",
    "ratio/clip_frac",
    "ratio/on_policy",
    "ratio/ess",
    "mismatch/kl",
    "mismatch/max_abs",
    "correction/masked_frac",
    "entropy/mean",
}


def microbatch(p, lengths=None, entropy=None, **fields):
    """Scores and tokens of one microbatch; a scalar field is that of every token."""
    p = torch.tensor(p, dtype=torch.float32)
    lengths = [len(p)] if lengths is None else lengths
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    fields = {name: torch.tensor(value, dtype=torch.float32).expand(len(p)) for name, value in fields.items()}
    scores = TokenScores(p, p == 0, None if entropy is None else torch.tensor(entropy))
    return scores, Tokens(torch.ones_like(p), sequence, len(lengths), torch.zeros_like(sequence), fields)


def metrics_of(loss, *microbatches):
    observe = PolicyStatistics(loss)
    for scores, tokens in microbatches:
        observe(scores, tokens)
    return observe.metrics()


def test_on_policy_step():
    got = metrics_of(PPO(), microbatch([-1.0] * 4, [2, 2], [0.5] * 4, logprobs=-1.0, advantages=[1.0, 1.0, -1.0, -1.0]))
    assert got.keys() == NAMES
    assert got == {
        "ratio/mean": 1,
        "ratio/clip_frac": 0,
        "ratio/on_policy": True,
        "ratio/ess": 1,
        "mismatch/kl": 0,
        "mismatch/max_abs": 0,
        "correction/masked_frac": 0,
        "entropy/mean": 0.5,
    }


def test_ratios_are_against_the_old_policy_and_the_mismatch_is_the_samplers():
    got = metrics_of(
        PPO(correction="mask", correction_cap=1.5),
        microbatch(
            [-1.0, -2.0], logprobs=[-2.0, -2.0], old_logprobs=[-1.5, -2.25], advantages=1.0, ref_logprobs=[-1.5, -2.0]
        ),
    )
    assert got["ratio/mean"] == pytest.approx((math.exp(0.5) + math.exp(0.25)) / 2)
    assert got["ratio/clip_frac"] == 1
    assert got["ratio/on_policy"] is False
    assert got["ratio/ess"] == pytest.approx((math.e + 1) ** 2 / (2 * (math.e**2 + 1)))
    assert got["mismatch/kl"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 2)
    assert got["mismatch/max_abs"] == 0.5
    assert got["correction/masked_frac"] == 0.5  # exp(0.5) is above the cap
    assert got["kl/ref"] == pytest.approx(0.106531 / 2, abs=1e-6)


def test_without_old_logprobs_the_mismatch_is_that_of_the_model():
    got = metrics_of(PPO(), microbatch([-1.0], logprobs=-1.5, advantages=1.0))
    assert got["mismatch/max_abs"] == 0.5
    assert got["mismatch/kl"] == pytest.approx(math.exp(0.5) - 1.5)


def test_masked_sequences_are_counted_by_tokens():
    # 100 tokens 0.012 apart: their product, exp(1.2) = 3.32, is above the cap of 3; the other sequence is kept
    fields = {"logprobs": [-1.012] * 100 + [-1.0] * 300, "old_logprobs": -1.0, "advantages": 1.0}
    loss = ImportanceSampling(correction="mask", correction_level="sequence", correction_cap=3.0)
    alone = {name: value[:100] if isinstance(value, list) else value for name, value in fields.items()}
    assert metrics_of(loss, microbatch([-1.0] * 100, **alone))["correction/masked_frac"] == 1
    assert metrics_of(loss, microbatch([-1.0] * 400, [100, 300], **fields))["correction/masked_frac"] == 0.25


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        # ratios 1.5, 1.5, 0.5, 0.5 with advantages 1, -1, 1, -1, and one of advantage 0
        (PPO(), 2 / 5),
        (PPO(dual_clip=1.4), 3 / 5),
        (PPO(clip_low=0.6, clip_high=0.6), 0),
        (CISPO(clip_high=0.2), 2 / 5),
        (CISPO(clip_low=0.2, clip_high=0.2), 4 / 5),
        (ImportanceSampling(), 0),
        (DRO(), 0),
        (GSPO(clip_low=0.2, clip_high=0.2), 0),  # the sequence's ratio is 1.5^3 / 4 to the power of 1 / 5: 0.96
        (GSPO(clip_low=0.01, clip_high=0.2), 2 / 5),
    ],
)
def test_clipped_share_counts_the_side_that_bites(loss, share):
    p = [-5 + math.log(ratio) for ratio in (1.5, 1.5, 0.5, 0.5, 1.5)]
    got = metrics_of(loss, microbatch(p, logprobs=-5.0, advantages=[1.0, -1.0, 1.0, -1.0, 0.0]))
    assert got["ratio/clip_frac"] == pytest.approx(share)


@pytest.mark.parametrize(("gap", "is_on_policy"), [(0.0, True), (9e-5, True), (2e-4, False), (-2e-4, False)])
def test_on_policy_is_within_a_tolerance(gap, is_on_policy):
    got = metrics_of(PPO(), microbatch([0.0, gap], logprobs=0.0, advantages=1.0))
    assert got["ratio/on_policy"] is is_on_policy


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_step_without_tokens_has_no_means(count):
    empty = microbatch([], [], [], logprobs=[], advantages=[], ref_logprobs=[])
    got = metrics_of(PPO(), *[empty] * count)
    assert got == dict.fromkeys(NAMES | ({"kl/ref"} if count else set()))


def test_entropy_that_was_not_asked_for_is_none():
    assert metrics_of(PPO(), microbatch([-1.0], logprobs=-1.0, advantages=1.0))["entropy/mean"] is None


@pytest.mark.parametrize("gap", [200.0, 1000.0, -1000.0])
def test_huge_differences_are_none_and_no_exception(gap):
    got = metrics_of(PPO(correction="mask"), microbatch([gap], logprobs=0.0, old_logprobs=gap / 2, advantages=1.0))
    assert got["mismatch/max_abs"] == abs(gap) / 2
    assert all(value is None or math.isfinite(value) for value in got.values())
    assert got["ratio/ess"] == (None if abs(gap) == 1000 else pytest.approx(1))  # exp(2000) is no float64
    alone = metrics_of(PPO(), microbatch([gap], logprobs=0.0, advantages=1.0))
    assert (alone["ratio/mean"] is None) == (gap == 1000)


@st.composite
def tokens_of_a_step(draw):
    values = st.lists(st.floats(-3, 0, width=32), min_size=1, max_size=8)
    p = draw(values)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    fields = {name: (-torch.rand(len(p), generator=generator)).tolist() for name in ("logprobs", "ref_logprobs")}
    fields["old_logprobs"] = [value - 0.1 for value in fields["logprobs"]]
    fields["advantages"] = torch.randn(len(p), generator=generator).tolist()
    return p, fields


@settings(deadline=None, max_examples=50)
@given(tokens_of_a_step(), st.data())
def test_microbatches_add_up(drawn, data):
    p, fields = drawn
    cuts = sorted(data.draw(st.sets(st.integers(1, len(p) - 1)))) if len(p) > 1 else []
    parts = [
        microbatch(p[start:stop], [1] * (stop - start), p[start:stop], **{k: v[start:stop] for k, v in fields.items()})
        for start, stop in pairwise([0, *cuts, len(p)])
    ]
    loss = PPO(correction="mask", correction_cap=0.91)
    whole = metrics_of(loss, microbatch(p, [1] * len(p), p, **fields))
    assert metrics_of(loss, *parts) == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert 0 < whole["ratio/ess"] <= 1


def test_it_keeps_no_graph():
    scores, tokens = microbatch([-1.0], logprobs=-1.0, advantages=1.0)
    scores.logprobs.requires_grad_()
    observe = PolicyStatistics(PPO())
    observe(scores, tokens)
    assert not observe._sums.requires_grad


# --------------------------------------------------------------------------------------------------------------- ranks


def rank(index, path, send):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=index, world_size=2)
    observe = PolicyStatistics(PPO())
    if index == 0:
        observe(*microbatch([-1.0, -2.0], [1, 1], [0.5, 0.5], logprobs=-1.5, advantages=1.0))
    else:  # a filler
        observe(*microbatch([], [], [], logprobs=[], advantages=[]))
    send.send(observe.metrics())
    dist.destroy_process_group()


@pytest.mark.multiproc
def test_a_rank_without_tokens_has_the_metrics_of_all(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=rank, args=(i, tmp_path / "store", send), daemon=True)
        for i, (_, send) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for receive, _ in pipes:
            assert receive.poll(60)
            results.append(receive.recv())
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    alone = metrics_of(PPO(), microbatch([-1.0, -2.0], [1, 1], [0.5, 0.5], logprobs=-1.5, advantages=1.0))
    assert results[0] == results[1] == alone


def test_maxima_and_sums_are_named_as_they_are_stored():
    observe = PolicyStatistics(PPO())
    observe(*microbatch([-1.0], logprobs=-1.5, advantages=1.0))
    assert len(observe._sums) == len(statistics._SUMS)
    assert len(observe._maxima) == len(statistics._MAXIMA)
