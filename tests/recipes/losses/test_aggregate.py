"""One number of a step: the same for every layout, split and loss, and as worked by hand."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import Aggregation
from datum import Datum, collate_datums, pack_features_for_thd, packed_sequence_thd_collater
from datum.errors import DataError
from datum.packing import make_filler
from recipes.losses.aggregate import (
    StepCounts,
    check_aggregation,
    count_batch,
    denominator,
    select_tokens,
    token_coefficients,
    weighted_sum,
)
from recipes.losses.cross_entropy import CrossEntropy
from recipes.losses.logprobs import score_targets

VOCAB, WIDTH, MAX_TOKENS = 7, 4, 5
MODES = [mode.value for mode in Aggregation]


class PolicyLoss:
    """What the losses of this file share; not linear in p, and in need of two side inputs."""

    linear = False
    linear_scale = 0.0
    required_fields = ("logprobs", "advantages")
    needs_entropy = False
    temperature = 1.0

    def __init__(self, aggregation, max_tokens=None):
        self.aggregation, self.max_tokens = aggregation, max_tokens


class RatioLoss(PolicyLoss):
    """-exp(p - b) A, a token's own ratio."""

    def __call__(self, target_logprobs, tokens):
        return -(target_logprobs - tokens.get("logprobs")).exp() * tokens.get("advantages")


class SequenceRatioLoss(PolicyLoss):
    """-exp(mean of p - b over the sequence's trained tokens) A at each of them."""

    def __call__(self, target_logprobs, tokens):
        sums = tokens.sum_by_sequence(target_logprobs - tokens.get("logprobs"))
        means = sums / tokens.sum_by_sequence(torch.ones_like(target_logprobs)).clamp(min=1)
        return -means.exp()[tokens.sequence] * tokens.get("advantages")


def make_loss(kind, mode):
    return kind(mode, MAX_TOKENS if mode == "constant" else None)


# -------------------------------------------------------------------------------------------- a step, laid out somehow


def step(batches, loss, table, head):
    """Loss and gradients of a model that sees one token at a time, so that no layout can change its scores."""
    counts = sum((count_batch(batch) for batch in batches), StepCounts())
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        tokens, selected, targets = select_tokens(batch)
        coefficients = token_coefficients(tokens, loss.aggregation)
        hidden, wanted = table[batch["input_ids"]][selected], targets[selected]
        assert wanted.tolist() == tokens.targets.tolist()
        if loss.linear:
            total = (
                total + score_targets(hidden, head, wanted, coefficients=coefficients * loss.linear_scale).weighted_sum
            )
        else:
            total = total + weighted_sum(coefficients, loss(score_targets(hidden, head, wanted).logprobs, tokens))
    value = total / denominator(counts, loss.aggregation, loss.max_tokens)
    return float(value.detach()), torch.autograd.grad(value, (table, head))


def step_by_definition(datums, kind, mode, table, head):
    """The same from the definition in docs/losses.md, datum by datum, in float64."""
    table, head = (x.detach().double().requires_grad_() for x in (table, head))
    sequence_sums, weight_sums = [], []
    for datum in datums:
        weights = datum.loss_fn_inputs["weights"].double()
        log_p = torch.log_softmax(table[datum.input_ids] @ head.t(), -1)
        p = log_p.gather(1, datum.loss_fn_inputs["target_tokens"][:, None]).squeeze(1)
        if kind is CrossEntropy:
            terms = -p
        else:
            is_trained = (weights != 0).double()
            difference = p - datum.loss_fn_inputs["logprobs"].double()
            if kind is SequenceRatioLoss:
                difference = ((difference * is_trained).sum() / is_trained.sum().clamp(min=1)).expand(len(datum))
            terms = -difference.exp() * datum.loss_fn_inputs["advantages"].double()
        sequence_sums.append((weights * terms).sum())
        weight_sums.append(float(weights.abs().sum()))
    if mode == "sequence":
        means = [s / w for s, w in zip(sequence_sums, weight_sums, strict=True) if w]
        value = sum(means) / len(means) if means else sum(sequence_sums)
    else:
        divisors = {"token": sum(weight_sums), "constant": len(datums) * MAX_TOKENS, "sum": 1}
        value = sum(sequence_sums) / (divisors[mode] or 1)
    return float(value.detach()), torch.autograd.grad(value, (table, head))


@st.composite
def steps(draw):
    """A step's datums, all with the same keys, and the model's two tensors."""
    per_token_advantages = draw(st.booleans())
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    datums = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)):
        weights = draw(
            st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, -1.0, 3.0]), min_size=length, max_size=length)
        )
        datums.append(
            Datum(
                torch.randint(0, VOCAB, (length,), generator=generator),
                {
                    "target_tokens": torch.randint(0, VOCAB, (length,), generator=generator),
                    "weights": weights,
                    "logprobs": -2 + 0.3 * torch.randn(length, generator=generator),
                    "advantages": torch.randn(length, generator=generator)
                    if per_token_advantages
                    else torch.randn((), generator=generator),
                },
            )
        )
    table = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    return datums, table, head


@st.composite
def layouts(draw, datums):
    """The datums in any order, cut into microbatches, each padded or packed into one row or several, among fillers."""
    order = draw(st.permutations(range(len(datums))))
    cuts = sorted(draw(st.sets(st.integers(1, len(datums) - 1)))) if len(datums) > 1 else []
    batches = []
    for start, stop in pairwise([0, *cuts, len(datums)]):
        members = [datums[i] for i in order[start:stop]]
        layout = draw(st.sampled_from(["padded", "packed", "rows"]))
        divisible = draw(st.sampled_from([None, 4]))
        if layout == "rows":
            middle = draw(st.integers(0, len(members)))
            rows = [row for row in (members[:middle], members[middle:]) if row]
            batches.append(
                packed_sequence_thd_collater([pack_features_for_thd([features_of(d) for d in row]) for row in rows])
            )
        else:
            batches.append(collate_datums(members, packed=layout == "packed", pad_seq_len_divisible=divisible))
        if draw(st.booleans()):
            packed = draw(st.booleans())
            batches.append(make_filler(datums[0].loss_fn_inputs, packed=packed))
    return batches


def features_of(datum):
    side_inputs = dict(datum.loss_fn_inputs)
    return {"input_ids": datum.input_ids, "labels": side_inputs.pop("target_tokens"), **side_inputs}


def assert_same_step(got, wanted):
    (got_loss, got_gradients), (wanted_loss, wanted_gradients) = got, wanted
    # float32 terms of up to about 30 against a float64 definition; weights of both signs cancel in the sum
    assert abs(got_loss - wanted_loss) <= 1e-5 * max(1, abs(wanted_loss))
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in wanted_gradients))
    for g, w in zip(got_gradients, wanted_gradients, strict=True):
        assert float((g.double() - w.double()).norm()) <= 1e-5 * max(float(w.double().norm()), 1e-3 * whole, 0.1)


@settings(deadline=None, max_examples=150)
@given(st.data(), steps(), st.sampled_from(MODES), st.sampled_from([CrossEntropy, RatioLoss, SequenceRatioLoss]))
def test_every_layout_gives_the_loss_and_gradient_of_the_definition(data, drawn, mode, kind):
    datums, table, head = drawn
    batches = data.draw(layouts(datums))
    assert_same_step(
        step(batches, make_loss(kind, mode), table, head), step_by_definition(datums, kind, mode, table, head)
    )


@settings(deadline=None, max_examples=40)
@given(st.data(), steps())
def test_every_layout_has_the_same_counts(data, drawn):
    datums, _, _ = drawn
    batches = data.draw(layouts(datums))
    counts = sum((count_batch(batch) for batch in batches), StepCounts())
    weights = [datum.loss_fn_inputs["weights"] for datum in datums]
    assert counts.weight_total == pytest.approx(sum(float(w.abs().sum()) for w in weights), rel=1e-12)
    assert counts.trained_sequences == sum(bool(w.any()) for w in weights)
    assert counts.sequences == len(datums)
    assert counts.tokens == sum(map(len, datums))
    assert StepCounts.from_tensor(counts.as_tensor()) == counts
    # ranks add up like microbatches
    assert StepCounts.from_tensor(sum(count_batch(batch).as_tensor() for batch in batches)) == counts


@settings(deadline=None, max_examples=40)
@given(steps(), st.sampled_from(MODES), st.booleans(), st.sampled_from([math.inf, -math.inf, math.nan]))
def test_what_an_untrained_position_holds_is_not_read(drawn, mode, packed, poison):
    datums, table, head = drawn
    batch = collate_datums(datums, packed=packed, pad_seq_len_divisible=4)
    loss = make_loss(SequenceRatioLoss, mode)
    wanted = step([batch], loss, table, head)
    _, selected, _ = select_tokens(batch)
    poisoned = dict(batch)
    for name in ("logprobs", "advantages"):
        if batch[name].shape == selected.shape:
            poisoned[name] = batch[name].masked_fill(~selected, poison)
    got = step([poisoned], loss, table, head)
    assert got[0] == wanted[0]
    for g, w in zip(got[1], wanted[1], strict=True):
        assert torch.equal(g, w)
        assert g.isfinite().all()


def test_the_loss_of_the_documentation_works_as_it_stands():
    text = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    torch.manual_seed(0)
    sides = {"target_tokens": [1, 2, 3], "weights": [1, 0, 2], "logprobs": [-1.0, -2.0, -3.0], "advantages": 0.5}
    batch = collate_datums([Datum([0, 1, 2], sides)], packed=True)
    table, head = (torch.randn(VOCAB, WIDTH, requires_grad=True) for _ in range(2))
    got, wanted = (step([batch], kind("sequence"), table, head) for kind in (names["RatioLoss"], RatioLoss))
    assert_same_step(got, wanted)


# ------------------------------------------------------------------------------------------------- worked by hand


def nll_step(sequences, mode="token", *, max_tokens=None, splits=None):
    """Loss of sequences of (nll, weight) pairs; `splits` cuts them into microbatches."""
    loss = CrossEntropy(mode, max_tokens)
    counts, total = StepCounts(), torch.zeros((), dtype=torch.float64)
    cuts = [0, *(splits or []), len(sequences)]
    for start, stop in pairwise(cuts):
        members = sequences[start:stop]
        batch = collate_datums(
            [Datum([1] * len(s), {"target_tokens": [2] * len(s), "weights": [w for _, w in s]}) for s in members],
            packed=True,
        )
        tokens, selected, _ = select_tokens(batch)
        logprobs = -torch.tensor([nll for s in members for nll, _ in s])[selected.flatten()]
        counts += count_batch(batch)
        total += weighted_sum(token_coefficients(tokens, mode), loss(logprobs, tokens))
    return float(total) / denominator(counts, mode, max_tokens)


@pytest.mark.parametrize(
    ("nlls", "weights", "loss"),
    [([2, 4], [0.5, 1], 10 / 3), ([2, 3], [1, -0.5], 1 / 3), ([2, 4], [1, -1], -1)],  # design, section 7
)
def test_weights_may_be_fractions_and_negative(nlls, weights, loss):
    sequence = list(zip(map(float, nlls), weights, strict=True))
    assert nll_step([sequence]) == pytest.approx(loss, abs=1e-9)
    assert nll_step([[token] for token in sequence], splits=[1]) == pytest.approx(loss, abs=1e-9)
    scaled = [(nll, weight / 64) for nll, weight in sequence]
    assert nll_step([scaled]) == pytest.approx(loss, abs=1e-9)
    assert nll_step([scaled], "sum") == pytest.approx(nll_step([sequence], "sum") / 64, abs=1e-9)


@pytest.mark.parametrize("splits", [None, [1], [1, 2]])
def test_a_step_is_a_mean_over_tokens_not_of_means(splits):
    rows = [[(4.0, 1.0)], [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], [(9.0, 0.0)]]
    assert nll_step(rows, splits=splits) == 1.75  # not (4 + 1) / 2


def test_ranks_are_one_step():
    # two tokens of nll 3 on one rank, six of nll 1 on the other: 12 / 8, where the mean of the ranks' means would be 2
    rank_0, rank_1 = [[(3.0, 1.0)] * 2], [[(1.0, 1.0)] * 6]
    assert nll_step(rank_0 + rank_1, splits=[1]) == 1.5


def test_a_microbatch_without_trained_tokens_adds_nothing():
    assert nll_step([[(1.0, 0.0)] * 3, [(1.0, 1.0)] * 4], splits=[1]) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_trained_tokens_has_loss_0(mode):
    assert nll_step([[(5.0, 0.0)]], mode, max_tokens=4 if mode == "constant" else None) == 0.0


@pytest.mark.parametrize("splits", [None, [1]])
@pytest.mark.parametrize(
    ("mode", "max_tokens", "loss"),
    [("sequence", None, 0.0), ("token", None, 0.5), ("constant", 4, 0.25), ("sum", None, 2)],
)
def test_modes_differ_on_the_case_that_tells_them_apart(mode, max_tokens, loss, splits):
    # ratio 1, advantages 1 and -1, lengths 1 and 3: terms -A
    assert nll_step([[(-1.0, 1.0)], [(1.0, 1.0)] * 3], mode, max_tokens=max_tokens, splits=splits) == pytest.approx(
        loss
    )


def test_only_constant_counts_a_sequence_without_trained_tokens():
    rows = [[(2.0, 1.0)], [(3.0, 1.0)] * 2]
    masked = [*rows, [(9.0, 0.0)]]
    for mode in ("token", "sequence", "sum"):
        assert nll_step(masked, mode) == nll_step(rows, mode)
    assert nll_step(rows, "constant", max_tokens=4) == pytest.approx(8 / (2 * 4))
    assert nll_step(masked, "constant", max_tokens=4) == pytest.approx(8 / (3 * 4))


def test_a_filler_is_no_sequence_and_no_token():
    for packed in (False, True):
        filler = make_filler(["target_tokens", "weights"], packed=packed)
        assert count_batch(filler) == StepCounts()
        tokens, selected, _ = select_tokens(filler)
        assert len(tokens) == 0
        assert selected.tolist() == [[False]]


def test_the_sum_over_a_step_is_added_up_in_float64():
    terms = torch.tensor([1e8, *[1.0] * 1000, -1e8])
    assert weighted_sum(torch.ones_like(terms), terms).item() == 1000


# ------------------------------------------------------------------------------------------------ what a batch may hold


def test_the_example_of_the_design_in_both_layouts():
    datums = [
        Datum([10, 11, 12], {"target_tokens": [11, 12, 13], "weights": [1, 1, 0], "advantages": 2.0}),
        Datum([20, 21], {"target_tokens": [21, 22], "weights": [1, 1], "advantages": -1.0}),
    ]
    for packed, wanted in ((False, [[1, 1, 0], [1, 1, 0]]), (True, [[1, 1, 0, 1, 1]])):
        tokens, selected, targets = select_tokens(collate_datums(datums, packed=packed))
        assert selected.tolist() == [[bool(x) for x in row] for row in wanted]
        assert targets[selected].tolist() == tokens.targets.tolist() == [11, 12, 21, 22]
        assert tokens.sequence.tolist() == [0, 0, 1, 1]
        assert tokens.num_sequences == 2
        assert tokens.fields["advantages"].tolist() == [2, 2, -1, -1]
        assert tokens.to("cpu").fields.keys() == {"advantages"}


def test_rows_of_several_documents_with_padding_between_them():
    batch = {
        "labels": torch.tensor([[1, 2, -100, 3, 4, -100], [5, 6, 7, -100, -100, -100]]),
        "seq_lens": torch.tensor([[2, 2], [3, -1000]]),
        "seq_lens_padded": torch.tensor([[3, 3], [6, -1000]]),
        "advantages": torch.tensor([10.0, 20.0, 30.0]),
    }
    tokens, _, _ = select_tokens(batch)
    assert tokens.sequence.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert tokens.get("advantages").tolist() == [10, 10, 20, 20, 30, 30, 30]
    assert count_batch(batch) == StepCounts(7.0, 3, 3, 7)


def test_without_weights_every_label_weighs_1():
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, -100, 4]])}
    tokens, selected, _ = select_tokens(batch)
    assert tokens.weights.tolist() == [1, 1]
    assert selected.tolist() == [[True, False, True]]
    assert count_batch(batch) == StepCounts(2.0, 1, 1, 3)
    assert select_tokens(batch, ignore_index=4)[0].targets.tolist() == [2, -100]


def test_a_label_that_is_ignored_weighs_0_whatever_its_weight():
    batch = {"labels": torch.tensor([[2, -100]]), "weights": torch.tensor([[1.0, 5.0]])}
    assert count_batch(batch).weight_total == 1


def test_one_token_sequences_may_carry_either_shape():
    labels = torch.tensor([[3], [4]])
    for advantages in (torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 2.0])):
        tokens, _, _ = select_tokens({"labels": labels, "advantages": advantages})
        assert tokens.get("advantages").tolist() == [1, 2]


def test_images_are_no_side_input():
    batch = {
        "labels": torch.tensor([[3]]),
        "pixel_values": torch.zeros(9, 4),
        "image_grid_thw": torch.ones(1, 3, dtype=torch.int64),
    }
    assert select_tokens(batch)[0].fields == {}


def test_sums_over_sequences_are_differentiable_and_0_where_nothing_is_trained():
    batch = {"labels": torch.tensor([[1, 2], [-100, -100], [3, -100]])}
    tokens, _, _ = select_tokens(batch)
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = tokens.sum_by_sequence(values)
    assert sums.tolist() == [3, 0, 4]
    (sums * torch.tensor([1.0, 7.0, 10.0])).sum().backward()
    assert values.grad.tolist() == [1, 1, 10]


def test_errors_say_what_was_got_and_what_is_accepted():
    labels = torch.tensor([[1, 2, 3]])
    with pytest.raises(DataError, match=r"no labels, so there is nothing to train; its keys are \['input_ids'\]"):
        select_tokens({"input_ids": labels})
    with pytest.raises(
        DataError, match=re.escape("'advantages' has shape [2]; accepted are [1, 3] (a value per position")
    ):
        select_tokens({"labels": labels, "advantages": torch.zeros(2)})
    with pytest.raises(DataError, match=re.escape("labels[0, 2] is a target, but seq_lens [[2]]")):
        select_tokens({"labels": labels, "seq_lens": torch.tensor([[2]])})
    two_rows = {"labels": torch.tensor([[1, 2], [3, 4]]), "seq_lens": torch.tensor([[1], [2]])}
    with pytest.raises(DataError, match=re.escape("labels[0, 1] is a target, but seq_lens [[1], [2]]")):
        select_tokens(two_rows)
    tokens, _, _ = select_tokens({"labels": labels, "logprobs": torch.zeros(1, 3)})
    with pytest.raises(
        DataError, match=r"reads 'advantages', which the batch does not have; it has \['logprobs'\]. Put"
    ):
        tokens.get("advantages")
    with pytest.raises(ValueError, match="aggregation is 'mean'; accepted are token, sequence, constant, sum"):
        check_aggregation("mean", None)
    for mode, max_tokens in (("constant", None), ("constant", 0), ("token", 4)):
        with pytest.raises(ValueError, match=f"aggregation is '{mode}' with max_tokens={max_tokens}; .* give it there"):
            CrossEntropy(mode, max_tokens)
        with pytest.raises(ValueError, match=f"aggregation is '{mode}' with max_tokens={max_tokens}"):
            denominator(StepCounts(1.0, 1, 1, 1), mode, max_tokens)
