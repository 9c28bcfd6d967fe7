"""Chunked target log-probabilities: values and gradients of the plain ones, without their memory or extra work."""

import math
import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.losses.logprobs import score_targets
from recipes.losses.logprobs_reference import score_targets_reference


@dataclass
class Problem:
    """Inputs of both functions; every float tensor is a leaf with or without a gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    coefficients: torch.Tensor
    options: dict

    @property
    def leaves(self):
        leaves = (self.hidden, self.weight, self.options["head_bias"])
        return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]

    def score(self, **options):
        return score_targets(self.hidden, self.weight, self.targets, **self.options, **options)

    def reference(self, **options):
        return score_targets_reference(self.hidden, self.weight, self.targets, **self.options, **options)


def make_problem(
    rows=7, vocab=11, width=5, *, seed=0, dtype=torch.float32, needs=(True, True, True), scale=1.0, **options
):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape, needs_grad):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_(needs_grad)

    bias = leaf(vocab, needs_grad=needs[2]) if options.pop("bias", False) else None
    return Problem(
        leaf(rows, width, needs_grad=needs[0]),
        leaf(vocab, width, needs_grad=needs[1]),
        torch.randint(0, vocab, (rows,), generator=generator),
        torch.randn(rows, generator=generator).to(torch.promote_types(dtype, torch.float32)),
        {"head_bias": bias, **options},
    )


@st.composite
def problems(draw):
    return make_problem(
        rows=draw(st.integers(1, 13)),
        vocab=draw(st.integers(1, 17)),
        width=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**16)),
        needs=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        scale=draw(st.sampled_from([0.3, 1.0])),
        bias=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 0.5, 1.7])),
        softcap=draw(st.sampled_from([None, 5.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.25])),
        entropy=draw(st.booleans()),
    )


def assert_gradients_close(got, wanted, within=1e-5, one_row=1.0):
    """Each within `within` of its norm.

    A gradient that is tiny beside the others is measured by theirs. Where 1 - p cancels (a saturated softmax of few
    words), all are tiny, and float32 leaves an error of about 1e-6 of what `one_row` can bring.
    """
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in wanted))
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        assert g.dtype == w.dtype
        assert (g.double() - w.double()).norm() <= within * max(float(w.double().norm()), 1e-3 * whole, 0.1 * one_row)


def nonlinear_loss(scores, coefficients):
    loss = (scores.logprobs.exp() * coefficients + 0.1 * scores.logprobs.square()).sum()
    return loss if scores.entropy is None else loss + (scores.entropy * coefficients).sum()


# ------------------------------------------------------------------------------------------------ values and gradients


@settings(deadline=None, max_examples=120)
@given(problems(), st.integers(1, 6))
def test_recomputed_scores_equal_those_of_full_logits(problem, chunk_size):
    got, wanted = problem.score(chunk_size=chunk_size), problem.reference()
    torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
    assert got.weighted_sum is None
    assert (got.entropy is None) == (wanted.entropy is None)
    if wanted.entropy is not None:
        torch.testing.assert_close(got.entropy, wanted.entropy, atol=1e-5, rtol=1e-5)
    if problem.leaves:
        gradients = [
            torch.autograd.grad(nonlinear_loss(scores, problem.coefficients), problem.leaves)
            for scores in (got, wanted)
        ]
        assert_gradients_close(*gradients)


@settings(deadline=None, max_examples=120)
@given(problems(), st.integers(1, 6), st.sampled_from([1.0, -0.3, 0.0, 1e4]))
def test_the_linear_path_equals_full_logits_for_any_incoming_gradient(problem, chunk_size, incoming):
    got = problem.score(chunk_size=chunk_size, coefficients=problem.coefficients)
    wanted = problem.reference(coefficients=problem.coefficients)
    torch.testing.assert_close(got.logprobs, wanted.logprobs.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.weighted_sum, wanted.weighted_sum, atol=1e-4, rtol=1e-5)
    assert not got.logprobs.requires_grad
    assert got.entropy is None or not got.entropy.requires_grad
    assert got.weighted_sum.requires_grad == bool(problem.leaves)
    if problem.leaves:
        assert_gradients_close(
            torch.autograd.grad(got.weighted_sum * incoming, problem.leaves),
            torch.autograd.grad(wanted.weighted_sum * incoming, problem.leaves),
            one_row=abs(incoming),
        )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False), (True, False, True)])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_pass_a_finite_difference_check(softcap, needs, entropy):
    problem = make_problem(
        5, 6, 3, dtype=torch.float64, needs=needs, bias=True, temperature=0.7, logit_scale=0.6, softcap=softcap
    )
    leaves = problem.leaves

    def recomputed(*_):
        scores = problem.score(entropy=entropy, chunk_size=2)
        return (scores.logprobs, scores.entropy) if entropy else scores.logprobs

    assert torch.autograd.gradcheck(recomputed, leaves)
    # gradcheck goes backward more than once, so the linear path is held against the path that has just passed
    scores = problem.score(chunk_size=2)
    assert_gradients_close(
        torch.autograd.grad(problem.score(coefficients=problem.coefficients, chunk_size=2).weighted_sum, leaves),
        torch.autograd.grad((scores.logprobs * problem.coefficients).sum(), leaves),
        within=1e-12,
    )


def test_entropy_alone_may_be_trained():
    problem = make_problem(entropy=True)
    got, wanted = problem.score(chunk_size=3).entropy.sum(), problem.reference().entropy.sum()
    assert_gradients_close(torch.autograd.grad(got, problem.leaves), torch.autograd.grad(wanted, problem.leaves))


def test_a_head_tied_to_the_embedding_gets_both_gradients():
    table = torch.randn(11, 5, requires_grad=True)
    ids, targets = torch.randint(0, 11, (2, 7))
    (got,) = torch.autograd.grad(score_targets(table[ids], table, targets, chunk_size=2).logprobs.sum(), table)
    (wanted,) = torch.autograd.grad(score_targets_reference(table[ids], table, targets).logprobs.sum(), table)
    assert_gradients_close([got], [wanted])


def test_strided_inputs_are_read_as_they_are():
    hidden = torch.randn(14, 10)[::2, ::2].requires_grad_()
    weight = torch.randn(5, 11).t().requires_grad_()
    targets = torch.randint(0, 11, (14,))[::2]
    coefficients = torch.randn(14)[::2]
    got = score_targets(hidden, weight, targets, coefficients=coefficients, chunk_size=3).weighted_sum
    wanted = score_targets_reference(hidden, weight, targets, coefficients=coefficients).weighted_sum
    assert_gradients_close(torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)))


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, -0.126928), (0.5, -0.018150)])
def test_temperature_is_that_of_sampling(temperature, wanted):
    # logits [2, 0]; at temperature 0.5 they are [4, 0]
    scores = score_targets(
        torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]]), torch.tensor([0]), temperature=temperature
    )
    assert scores.logprobs.item() == pytest.approx(wanted, abs=1e-6)


def test_logits_of_any_size_give_finite_results():
    hidden = torch.tensor([[3e4], [-3e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    scores = score_targets(hidden, weight, torch.tensor([0, 0, 1]), entropy=True)
    assert scores.logprobs.tolist() == [0.0, -6e4, pytest.approx(-math.log(3))]
    (scores.logprobs + scores.entropy).sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_the_most_likely_token_is_told():
    problem = make_problem(40, 3)
    assert problem.score(chunk_size=7).is_argmax.tolist() == problem.reference().is_argmax.tolist()
    tied = score_targets(torch.zeros(1, 2), torch.randn(4, 2), torch.tensor([3]))
    assert tied.is_argmax.tolist() == [True]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 2**16))
def test_rows_do_not_know_of_each_other(cut, seed):
    problem = make_problem(10, seed=seed)
    whole = problem.score(chunk_size=4).logprobs
    parts = [
        score_targets(problem.hidden[rows], problem.weight, problem.targets[rows], chunk_size=3).logprobs
        for rows in (slice(0, cut), slice(cut, 10))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- no rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)])
def test_no_rows_give_zero_with_a_live_graph(linear, needs, dtype):
    problem = make_problem(0, dtype=dtype, needs=needs, bias=True, entropy=True)
    scores = problem.score(coefficients=problem.coefficients if linear else None)
    assert scores.logprobs.shape == scores.entropy.shape == scores.is_argmax.shape == (0,)
    total = scores.weighted_sum if linear else scores.logprobs.sum() + scores.entropy.sum()
    assert total.item() == 0
    total.backward()
    for leaf in problem.leaves:
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.count_nonzero() == 0


# ------------------------------------------------------------------------------------------------------ work and memory


class Watch(TorchDispatchMode):
    """Counts matrix products and keeps the largest number of elements that an operation returned."""

    def __init__(self):
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(
    ("needs", "linear", "forward", "backward"),
    [
        # products a chunk; full logits take one in forward, two in backward (one with a frozen head)
        ((True, True, True), True, 3, 0),
        ((True, False, False), True, 2, 0),
        ((False, True, False), True, 2, 0),
        ((False, False, False), True, 1, 0),
        ((True, True, True), False, 1, 3),
        ((True, False, False), False, 2, 0),
        ((False, True, False), False, 1, 2),
        ((False, False, False), False, 1, 0),
    ],
)
def test_what_needs_no_gradient_costs_nothing(needs, linear, forward, backward):
    problem = make_problem(12, needs=needs, bias=True)
    coefficients = problem.coefficients if linear else None
    with Watch() as watch:
        scores = problem.score(coefficients=coefficients, chunk_size=4)
        assert watch.products == 3 * forward
        if problem.leaves:
            (scores.weighted_sum if linear else scores.logprobs.sum()).backward()
            assert watch.products == 3 * (forward + backward)
    with torch.no_grad(), Watch() as watch:
        assert not problem.score(coefficients=coefficients, chunk_size=4).logprobs.requires_grad
    assert watch.products == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear", [False, True])
def test_nothing_of_rows_times_vocabulary_is_formed(linear, dtype):
    rows, vocab, chunk_size = 64, 50, 8
    problem = make_problem(rows, vocab, 3, dtype=dtype, bias=True, softcap=3.0, entropy=True)
    with Watch() as watch:
        scores = problem.score(coefficients=problem.coefficients if linear else None, chunk_size=chunk_size)
        (scores.weighted_sum if linear else scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert watch.largest == chunk_size * vocab


def test_chunks_are_of_nearly_equal_size():
    with Watch() as watch:
        make_problem(9, 50, needs=(False, False, False)).score(chunk_size=8)
    assert watch.products == 2
    assert watch.largest == 5 * 50


# ------------------------------------------------------------------------------------------------- one backward, once


def test_a_second_backward_through_the_weighted_sum_is_refused():
    problem = make_problem()
    total = problem.score(coefficients=problem.coefficients).weighted_sum
    total.backward(retain_graph=True)
    first = problem.hidden.grad.clone()
    with pytest.raises(RuntimeError, match=r"second backward through weighted_sum.*Call score_targets again"):
        total.backward()
    assert torch.equal(problem.hidden.grad, first)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)])
def test_recomputed_scores_may_be_used_by_several_losses(needs):
    problem = make_problem(needs=needs)
    scores, wanted = problem.score(chunk_size=3), problem.reference()
    for loss in (torch.sum, lambda logprobs: logprobs.exp().sum()):
        assert_gradients_close(
            torch.autograd.grad(loss(scores.logprobs), problem.leaves, retain_graph=True),
            torch.autograd.grad(loss(wanted.logprobs), problem.leaves, retain_graph=True),
        )


@pytest.mark.parametrize("linear", [False, True])
def test_gradients_of_gradients_are_refused(linear):
    problem = make_problem()
    scores = problem.score(coefficients=problem.coefficients if linear else None)
    total = scores.weighted_sum if linear else scores.logprobs.sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True, but its gradients have no gradient.*_reference"):
        torch.autograd.grad(total, [problem.hidden], create_graph=True)


# --------------------------------------------------------------------------------------------------------------- dtypes


def rounding_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("linear", [False, True])
def test_bf16_rounds_products_but_not_sums(linear):
    # 2048 chunks of one row: added up in bf16, the head's gradient would be off by several per cent
    problem = make_problem(2048, 16, 8, dtype=torch.bfloat16)
    scores = problem.score(coefficients=problem.coefficients if linear else None, chunk_size=1)
    assert scores.logprobs.dtype == torch.float32
    got = torch.autograd.grad(
        scores.weighted_sum if linear else (scores.logprobs * problem.coefficients).sum(), problem.leaves
    )
    assert [gradient.dtype for gradient in got] == [torch.bfloat16] * 2
    exact = make_problem(2048, 16, 8, dtype=torch.bfloat16)
    exact.hidden, exact.weight = (x.detach().double().requires_grad_() for x in (exact.hidden, exact.weight))
    wanted = exact.reference(coefficients=problem.coefficients)
    assert (scores.logprobs - wanted.logprobs).abs().max() < 0.06  # logits of up to 16 have a step of 2^-4
    for gradient, exact_gradient in zip(got, torch.autograd.grad(wanted.weighted_sum, exact.leaves), strict=True):
        assert rounding_error(gradient, exact_gradient) < 6e-3


def test_bf16_gradients_are_scaled_by_the_unrounded_incoming_gradient():
    incoming = 1.34765625  # half way between two numbers of bf16, 0.3 % from either
    gradients = []
    for scale in (1.0, incoming):
        problem = make_problem(64, 300, 64, dtype=torch.bfloat16, scale=0.3)
        gradients.append(
            torch.autograd.grad(problem.score(coefficients=problem.coefficients).weighted_sum * scale, problem.leaves)
        )
    for plain, scaled in zip(*gradients, strict=True):
        # single elements still round to bf16; on the average over many the factor shows
        ratio = float((scaled.double() * plain.double()).sum() / plain.double().square().sum())
        assert ratio == pytest.approx(incoming, abs=1e-3)
    torch.testing.assert_close(gradients[1][0], (gradients[0][0].float() * incoming).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_casts_like_a_linear_layer(linear, needs, backward_inside):
    problem = make_problem(33, needs=needs, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = problem.score(coefficients=problem.coefficients if linear else None, chunk_size=8)
        wanted = problem.reference(coefficients=problem.coefficients)
        total = scores.weighted_sum if linear else (scores.logprobs * problem.coefficients).sum()
        if backward_inside:
            got = torch.autograd.grad(total, problem.leaves)
    if not backward_inside:
        got = torch.autograd.grad(total, problem.leaves)
    assert scores.logprobs.dtype == torch.float32
    assert not torch.equal(scores.logprobs, problem.score().logprobs)  # the products did run in bf16
    torch.testing.assert_close(scores.logprobs, wanted.logprobs, atol=0.04, rtol=0)
    assert [gradient.dtype for gradient in got] == [torch.float32] * len(problem.leaves)
    for gradient, reference in zip(got, torch.autograd.grad(wanted.weighted_sum, problem.leaves), strict=True):
        assert rounding_error(gradient, reference.double()) < 0.02


def test_the_weighted_sum_is_added_up_in_float64():
    rows = 20_000
    problem = make_problem(rows, 3, 2, needs=(False, False, False))
    scores = problem.score(coefficients=torch.ones(rows), chunk_size=4096)
    assert scores.weighted_sum.dtype == torch.float64
    assert scores.weighted_sum.item() == pytest.approx(math.fsum(scores.logprobs.tolist()), rel=1e-13)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(7, 4)}, "hidden [7, 4] and head_weight [11, 5]; accepted are [N, H] and [V, H]"),
        ({"hidden": torch.zeros(1, 7, 5)}, "hidden [1, 7, 5] and head_weight [11, 5]"),
        ({"targets": torch.zeros(6, dtype=torch.int64)}, "targets [6] torch.int64; accepted is int64 of shape [7]"),
        ({"targets": torch.zeros(7)}, "targets [7] torch.float32; accepted is int64"),
        ({"targets": torch.tensor([0, 1, 11, 0, 0, 0, 0])}, "targets[2] is 11; accepted are ids from 0 to 10"),
        ({"targets": torch.tensor([0, 1, 2, -100, 0, 0, 0])}, "targets[3] is -100; accepted are ids from 0 to 10"),
        ({"hidden": torch.zeros(7, 5).bfloat16()}, "hidden is torch.bfloat16, head_weight is torch.float32"),
        ({"head_bias": torch.zeros(5)}, "head_bias [5]; accepted is [11]"),
        ({"coefficients": torch.zeros(6)}, "coefficients [6] torch.float32; accepted is a float tensor of shape [7]"),
        ({"coefficients": torch.zeros(7, dtype=torch.int64)}, "coefficients [7] torch.int64; accepted is a float"),
        ({"coefficients": torch.zeros(7, requires_grad=True)}, "they are constants here: detach them"),
        ({"temperature": 0.0}, "temperature=0.0; accepted are numbers above 0"),
        ({"temperature": math.nan}, "temperature=nan; accepted are numbers above 0"),
        ({"softcap": -1.0}, "softcap=-1.0; accepted are numbers above 0"),
        ({"chunk_size": 0}, "chunk_size=0; accepted are numbers above 0"),
    ],
)
def test_errors_say_what_was_got_and_what_is_accepted(change, message):
    problem = make_problem()
    arguments = {"hidden": problem.hidden, "head_weight": problem.weight, "targets": problem.targets, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        score_targets(**arguments)
