"""Policy losses: in every layout what their definition says, as worked by hand, and each option has an effect."""

import dataclasses
import inspect
import itertools
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.closed import ConfigError
from conf.policy import (
    CISPOConfig,
    Correction,
    DROConfig,
    GSPOConfig,
    ImportanceSamplingConfig,
    KLConfig,
    KLEstimator,
    KLPlace,
    Level,
    PPOConfig,
)
from datum import Datum
from datum.errors import DataError
from recipes.losses.aggregate import StepCounts, Tokens, denominator, token_coefficients, weighted_sum
from recipes.losses.cispo import CISPO
from recipes.losses.dro import DRO
from recipes.losses.gspo import GSPO
from recipes.losses.importance_sampling import ImportanceSampling
from recipes.losses.logprobs import score_targets
from recipes.losses.policy import kl_terms
from recipes.losses.policy_reference import ReferenceOptions, ReferenceSequence, step_loss_reference
from recipes.losses.ppo import PPO
from recipes.runtime.build import instantiate
from tests.recipes.losses.test_aggregate import assert_same_step, layouts, step

LOSSES = {"importance_sampling": ImportanceSampling, "ppo": PPO, "cispo": CISPO, "gspo": GSPO, "dro": DRO}
CONFIGS = [ImportanceSamplingConfig, PPOConfig, CISPOConfig, GSPOConfig, DROConfig]
OWN_OPTIONS = {
    "importance_sampling": (),
    "ppo": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_low", "clip_high"),
    "gspo": ("clip_low", "clip_high", "variant"),
    "dro": ("beta",),
}
VOCAB, WIDTH = 5, 3


def build(options):
    """The loss of the reference's options."""
    own = {name: getattr(options, name) for name in OWN_OPTIONS[options.name]}
    return LOSSES[options.name](
        **own,
        aggregation=options.aggregation,
        max_tokens=options.max_tokens,
        kl=KLConfig(options.kl_coef, KLEstimator(options.kl_estimator), KLPlace(options.kl_place)),
        correction=options.correction,
        correction_level=options.correction_level,
        correction_cap=options.correction_cap,
        correction_low=options.correction_low,
    )


def tokens_of(sequences, **fields):
    """Tokens of float64 sequences given by their lengths, all of weight 1; a field has a value per token."""
    sequence = torch.arange(len(sequences)).repeat_interleave(torch.tensor(sequences))
    return Tokens(
        torch.ones(len(sequence), dtype=torch.float64),
        sequence,
        len(sequences),
        torch.zeros_like(sequence),
        {name: torch.as_tensor(values, dtype=torch.float64) for name, values in fields.items()},
    )


def value_and_gradient(loss, p, tokens):
    """Loss of a step of these tokens alone, and its gradient by p, as lists."""
    p = torch.as_tensor(p, dtype=torch.float64).requires_grad_()
    counts = StepCounts(float(tokens.weights.abs().sum()), tokens.num_sequences, tokens.num_sequences, len(tokens))
    value = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p, tokens))
    value = value / denominator(counts, loss.aggregation, loss.max_tokens)
    return value.item(), torch.autograd.grad(value, p)[0].tolist()


# ------------------------------------------------------------------------------------- against the definition


@st.composite
def option_sets(draw):
    name = draw(st.sampled_from([*LOSSES]))
    aggregation = draw(st.sampled_from(["token", "sequence", "constant", "sum"]))
    correction = draw(st.sampled_from(["none", "truncate", "mask"]))
    place = draw(st.sampled_from(["loss", "loss", "reward"]))
    return ReferenceOptions(
        name,
        aggregation,
        4 if aggregation == "constant" else None,
        clip_low=draw(st.sampled_from([0.1, 0.4, 1.0])),
        clip_high=draw(st.sampled_from([0.15, 0.5])),
        dual_clip=draw(st.sampled_from([None, 1.7])) if name == "ppo" else None,
        variant=draw(st.sampled_from(["sequence", "token"])),
        kl_coef=draw(st.sampled_from([0.0, 0.3])),
        kl_estimator="k1" if place == "reward" else draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_place=place,
        correction=correction,
        correction_level=draw(st.sampled_from(["token", "sequence"])),
        correction_cap=1.3,
        correction_low=0.8 if correction == "mask" else 0.0,
    )


@st.composite
def policy_steps(draw, options):
    """Datums with the fields that the options ask for, and the model's two tensors."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    has_old = options.correction != "none" or draw(st.booleans())
    per_token = draw(st.booleans())
    weights = st.sampled_from([0.0, 1.0, 1.0, 0.5, -1.0])
    datums = []
    for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)):
        sides = {
            "target_tokens": torch.randint(0, VOCAB, (length,), generator=generator),
            "weights": draw(st.lists(weights, min_size=length, max_size=length)),
            "logprobs": -1.6 + 0.4 * torch.randn(length, generator=generator),
            "advantages": torch.randn(length if per_token else (), generator=generator),
        }
        if has_old:
            sides["old_logprobs"] = sides["logprobs"] + 0.2 * torch.randn(length, generator=generator)
        if options.kl_coef:
            sides["ref_logprobs"] = -1.6 + 0.4 * torch.randn(length, generator=generator)
        datums.append(Datum(torch.randint(0, VOCAB, (length,), generator=generator), sides))
    table = (0.5 * torch.randn(VOCAB, WIDTH, generator=generator)).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    return datums, table, head


def step_by_definition(datums, options, table, head):
    table, head = (tensor.detach().double().requires_grad_() for tensor in (table, head))
    sequences = []
    for datum in datums:
        sides = {name: value.double() for name, value in datum.loss_fn_inputs.items() if name != "target_tokens"}
        log_p = torch.log_softmax(table[datum.input_ids] @ head.t(), -1)
        sides["advantages"] = sides["advantages"].expand(len(datum))
        sequences.append(
            ReferenceSequence(
                p=log_p.gather(1, datum.loss_fn_inputs["target_tokens"][:, None]).squeeze(1),
                **{name: value.tolist() for name, value in sides.items()},
            )
        )
    value = step_loss_reference(sequences, options)
    return value.item(), torch.autograd.grad(value, (table, head))


@settings(deadline=None, max_examples=150)
@given(st.data(), option_sets())
def test_every_layout_gives_loss_and_gradient_of_the_definition(data, options):
    datums, table, head = data.draw(policy_steps(options))
    batches = data.draw(layouts(datums))
    assert_same_step(step(batches, build(options), table, head), step_by_definition(datums, options, table, head))


@pytest.mark.parametrize("options", [ReferenceOptions(name, correction="truncate", kl_coef=0.1) for name in LOSSES])
def test_no_trained_token_is_loss_0_and_gradient_0(options):
    p = torch.zeros(0, requires_grad=True)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages")
    tokens = Tokens(p.detach(), torch.zeros(0, dtype=torch.int64), 1, p.detach(), dict.fromkeys(names, p.detach()))
    loss = build(options)
    value = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p, tokens))
    value.backward()
    assert value.item() == 0
    assert p.grad.shape == (0,)


# ------------------------------------------------------------------------------------------ every option differs

ONE = ReferenceOptions("ppo")


def variants(**options):
    """`ONE` with each value of one option, other options set beside it."""
    (name, values), *rest = options.items()
    return [dataclasses.replace(ONE, **{name: value}, **dict(rest)) for value in values]


FAMILIES = {
    "losses": [ReferenceOptions(name) for name in LOSSES],
    "clip_low": variants(clip_low=[0.0, 0.2, 1.0]),
    "clip_high": variants(clip_high=[0.0, 0.2, 1.0]),
    "cispo clip": [ReferenceOptions("cispo", clip_low=low, clip_high=high) for low, high in [(1, 4), (0.2, 4), (1, 0)]],
    "dual_clip": variants(dual_clip=[None, 1.5, 1.2]),
    "gspo variant": [ReferenceOptions("gspo", clip_low=1, clip_high=2, variant=v) for v in ("sequence", "token")],
    "dro beta": [ReferenceOptions("dro", beta=beta) for beta in (0.0, 0.05, 1.0)],
    "kl estimator": [ONE, *variants(kl_estimator=["k1", "k2", "k3"], kl_coef=0.1)],
    "kl coef": variants(kl_coef=[0.0, 0.1, 1.0]),
    "kl place": variants(kl_place=["loss", "reward"], kl_estimator="k1", kl_coef=0.1),
    "correction": variants(correction=["none", "truncate", "mask"], correction_cap=1.2),
    "correction_level": variants(correction_level=["token", "sequence"], correction="truncate", correction_cap=9.0),
    "correction_cap": variants(correction_cap=[1.05, 1.2, 9.0], correction="truncate"),
    "correction_low": variants(correction_low=[0.0, 0.9], correction="mask"),
    "aggregation": [
        dataclasses.replace(ONE, aggregation=mode, max_tokens=4 if mode == "constant" else None)
        for mode in ("token", "sequence", "constant", "sum")
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_value_of_an_option_has_its_own_loss_or_gradient(family):
    p = [-1.0, -0.9, -2.0, -1.2, -0.3, -1.0]
    tokens = tokens_of(
        [1, 3, 2],
        logprobs=[-1.5, -0.4, -2.2, -2.0, -1.0, -0.6],
        old_logprobs=[-1.3, -0.6, -2.1, -1.7, -1.1, -0.7],
        ref_logprobs=[-1.1, -0.9, -1.5, -1.6, -0.4, -1.3],
        advantages=[1.0, -0.5, 0.7, -1.0, 1.2, 0.4],
    )
    results = []
    for options in FAMILIES[family]:
        loss = build(options)
        fields = {name: tokens.fields[name] for name in (*loss.required_fields, "old_logprobs")}
        value, gradient = value_and_gradient(loss, p, dataclasses.replace(tokens, fields=fields))
        results.append(torch.tensor([value, *gradient]))
    for one, other in itertools.combinations(results, 2):
        assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("config", CONFIGS)
def test_a_loss_has_the_defaults_of_its_config(config):
    loss = instantiate(config())
    parameters = inspect.signature(type(loss)).parameters
    for field in dataclasses.fields(config):
        if field.name in parameters:
            default = field.default.value if isinstance(field.default, Level) else field.default
            assert parameters[field.name].default == default
    assert (loss.aggregation, loss.linear, loss.needs_entropy) == (config().aggregation, False, True)
    assert vars(type(loss)()) == vars(loss)


# ------------------------------------------------------------------------------------------------- worked by hand


@pytest.mark.parametrize(
    ("mode", "max_tokens", "value"),
    [("sequence", None, 0.0), ("token", None, 0.5), ("constant", 4, 0.25)],
)
@pytest.mark.parametrize("kind", [ImportanceSampling, PPO, GSPO])
def test_modes_at_ratio_1(kind, mode, max_tokens, value):
    tokens = tokens_of([1, 3], logprobs=[-1.0] * 4, advantages=[1, -1, -1, -1])
    assert value_and_gradient(kind(aggregation=mode, max_tokens=max_tokens), [-1.0] * 4, tokens)[0] == pytest.approx(
        value, abs=1e-12
    )


def test_a_loss_of_0_may_have_a_gradient():
    tokens = tokens_of([2, 2], logprobs=[-1.0] * 4, advantages=[1, 1, -1, -1])
    value, gradient = value_and_gradient(PPO(), [-1.0] * 4, tokens)
    assert value == 0
    assert gradient == [-0.25, -0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.1, 1, -1.1, -1.1),
        (1.5, 1, -1.2, 0),  # clipped: the ratio may not grow further
        (0.5, 1, -0.5, -0.5),
        (1.5, -1, 1.5, 1.5),
        (0.5, -1, 0.8, 0),  # clipped: the ratio may not shrink further
        (2.5, -2, 5, 5),
        (4.0, -2, 6, 0),  # dual clip: 3 |A|
        (4.0, 0, 0, 0),
    ],
)
def test_ppo_by_hand(ratio, advantage, value, gradient):
    tokens = tokens_of([1], logprobs=[-5.0], advantages=[advantage])
    loss = PPO(dual_clip=3.0)
    got = value_and_gradient(loss, [-5 + math.log(ratio)], tokens)
    assert got == (pytest.approx(value), [pytest.approx(gradient)])
    p = torch.tensor([-5 + math.log(ratio)], dtype=torch.float64)
    assert loss.is_clipped(p, tokens).item() == (gradient == 0 and advantage != 0)


def test_dual_clip_is_off_by_default():
    tokens = tokens_of([1], logprobs=[-5.0], advantages=[-2])
    assert value_and_gradient(PPO(), [-5 + math.log(4)], tokens) == (pytest.approx(8), [pytest.approx(8)])


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    tokens = tokens_of([2], logprobs=[-1.0, -1.0], advantages=[2, -2])
    loss = CISPO(clip_low=0.5, clip_high=0.2, aggregation="sum")
    value, gradient = value_and_gradient(loss, [-1 + math.log(1.5), -1 + math.log(0.1)], tokens)
    assert gradient == pytest.approx([-1.2 * 2, 0.5 * 2])
    assert value == pytest.approx(-1.2 * 2 * (-1 + math.log(1.5)) + 0.5 * 2 * (-1 + math.log(0.1)))


def test_gspo_has_one_ratio_a_sequence_in_two_variants():
    # differences 0.2 and 0.4: s = exp(0.3) at both tokens
    s = math.exp(0.3)
    tokens = tokens_of([2], logprobs=[-1.0, -2.0], advantages=[1.0, 3.0])
    for variant, gradient in [("sequence", [-2 * s, -2 * s]), ("token", [-s, -3 * s])]:
        loss = GSPO(clip_low=0.5, clip_high=0.5, variant=variant, aggregation="sum")
        got = value_and_gradient(loss, [-0.8, -1.6], tokens)
        assert got == (pytest.approx(-4 * s), pytest.approx(gradient))
    assert GSPO().aggregation.value == "sequence"


def test_dro_by_hand():
    tokens = tokens_of([1], logprobs=[-1.5], advantages=[2.0])
    got = value_and_gradient(DRO(beta=0.1), [-1.0], tokens)
    assert got == (pytest.approx(2.0 + 0.05 * 0.25), [pytest.approx(-2.0 + 0.1 * 0.5)])


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_coefficient_changes_the_loss_by_its_share(estimator, kl):
    tokens = tokens_of([1], logprobs=[-1.0], advantages=[1.0], ref_logprobs=[-1.5])
    values = [
        value_and_gradient(PPO(kl=KLConfig(coef, KLEstimator(estimator))), [-1.0], tokens)[0] for coef in (0.0, 0.1)
    ]
    assert values[1] - values[0] == pytest.approx(0.1 * kl, abs=1e-7)


def test_kl_is_not_multiplied_by_the_correction():
    fields = {"logprobs": [-2.0], "old_logprobs": [-1.0], "ref_logprobs": [-1.5], "advantages": [0.0]}
    loss = PPO(kl=KLConfig(0.1), correction="mask")  # e > 2: the token's own term is masked
    assert value_and_gradient(loss, [-1.0], tokens_of([1], **fields))[0] == pytest.approx(0.0106531, abs=1e-7)


def test_kl_in_the_reward_is_no_part_of_the_loss():
    loss = PPO(kl=KLConfig(0.1, KLEstimator.k1, KLPlace.reward))
    assert loss.required_fields == ("logprobs", "advantages")
    tokens = tokens_of([1], logprobs=[-1.0], advantages=[1.0])
    assert value_and_gradient(loss, [-1.0], tokens) == value_and_gradient(PPO(), [-1.0], tokens)


def correction(differences, **options):
    """Rho of one sequence with these o - b."""
    fields = {"logprobs": [-2.0] * len(differences), "old_logprobs": [-2.0 + d for d in differences]}
    tokens = tokens_of([len(differences)], advantages=[1.0] * len(differences), **fields)
    return ImportanceSampling(**options).correction_weights(tokens)


def test_correction_by_hand():
    # 100 tokens, each 0.012 apart: exp(1.2) as a sequence, exp(0.012) as tokens
    hundred = [0.012] * 100
    loose = {"correction": "truncate", "correction_cap": 9.0}
    assert correction(hundred, correction_level="sequence", **loose).tolist() == pytest.approx([3.3201] * 100, abs=1e-4)
    masked = correction(hundred, correction="mask", correction_level="sequence", correction_cap=3.0)
    assert masked.tolist() == [0.0] * 100
    kept = correction(hundred, correction="mask", correction_cap=3.0)
    assert kept.tolist() == pytest.approx([1.01207] * 100, abs=1e-5)
    assert correction([1.0], correction="truncate", correction_cap=2.0).tolist() == [2.0]
    assert correction([1.0], correction="mask", correction_cap=2.0).tolist() == [0.0]
    low = correction([-1.0, -0.1], correction="mask", correction_low=0.5)
    assert low.tolist() == pytest.approx([0.0, math.exp(-0.1)])
    assert correction([1.0]) is None


def test_the_correction_multiplies_term_and_gradient():
    fields = {"logprobs": [-1.2, -3.0], "old_logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    loss = ImportanceSampling(correction="truncate", aggregation="sum")
    value, gradient = value_and_gradient(loss, [-0.9, -1.0], tokens_of([2], **fields))
    terms = [-math.exp(0.2) * math.exp(0.1), -2.0]  # the ratio is taken against the old log-probability
    assert (value, gradient) == (pytest.approx(sum(terms)), pytest.approx(terms))


def test_a_mask_does_not_change_the_denominator():
    fields = {"logprobs": [-1.0, -3.0], "old_logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    loss = ImportanceSampling(correction="mask")
    assert value_and_gradient(loss, [-1.0, -1.0], tokens_of([2], **fields))[0] == pytest.approx(-1 / 2)


def test_one_temperature_on_both_sides():
    loss = PPO(temperature=0.5)
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    scores = score_targets(hidden, head, torch.tensor([0]), temperature=loss.temperature)
    assert scores.logprobs.item() == pytest.approx(-0.018150, abs=1e-6)
    assert score_targets(hidden, head, torch.tensor([0])).logprobs.item() == pytest.approx(-0.126928, abs=1e-6)
    tokens = tokens_of([1], logprobs=[-0.018149928], advantages=[1.0])
    assert loss(scores.logprobs, tokens).item() == pytest.approx(-1, abs=1e-6)


@pytest.mark.parametrize("kind", [PPO, CISPO, GSPO])
def test_a_clipped_ratio_beyond_float_range_has_finite_gradients(kind):
    tokens = tokens_of([1], logprobs=[-1000.0], advantages=[1.0])
    value, gradient = value_and_gradient(kind(), [-1.0], tokens)
    assert math.isfinite(value)
    assert math.isfinite(gradient[0])


def test_k3_does_not_lose_small_differences():
    assert kl_terms("k3", torch.tensor([-1.0]), torch.tensor([-1.001])).item() == pytest.approx(5e-7, rel=0.05)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_required_fields_follow_the_options():
    assert PPO().required_fields == ("logprobs", "advantages")
    assert PPO(kl=KLConfig(0.1)).required_fields == ("logprobs", "advantages", "ref_logprobs")
    assert PPO(correction="mask").required_fields == ("logprobs", "advantages", "old_logprobs")


@pytest.mark.parametrize("missing", ["logprobs", "advantages", "old_logprobs", "ref_logprobs"])
def test_a_missing_field_is_named(missing):
    fields = {name: [-1.0] for name in ("logprobs", "advantages", "old_logprobs", "ref_logprobs") if name != missing}
    loss = PPO(kl=KLConfig(0.1), correction="truncate")
    with pytest.raises(DataError, match=f"the loss reads '{missing}', which the batch does not have"):
        loss(torch.tensor([-1.0]), tokens_of([1], **fields))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PPO, {"clip_low": 1.5}, "loss.clip_low=1.5: accepted are finite numbers from 0 to 1"),
        (CISPO, {"clip_high": -0.1}, "loss.clip_high=-0.1: accepted are finite numbers from 0"),
        (PPO, {"dual_clip": 1.0}, "loss.dual_clip=1.0: accepted are finite numbers above 1"),
        (GSPO, {"variant": "word"}, "loss.variant=word: accepted are sequence, token"),
        (DRO, {"beta": math.nan}, "loss.beta=nan: accepted are finite numbers from 0"),
        (PPO, {"temperature": 0}, "rollout.temperature=0: accepted are finite numbers above 0"),
        (PPO, {"correction": "clip"}, "loss.correction=clip: accepted are none, truncate, mask"),
        (PPO, {"correction_level": "word"}, "loss.correction_level=word: accepted are token, sequence"),
        (PPO, {"correction_cap": 0.0}, "loss.correction_cap=0.0: accepted are finite numbers above 0"),
        (PPO, {"correction_low": 3.0}, "loss.correction_low=3.0 is above loss.correction_cap=2.0"),
        (PPO, {"correction": "truncate", "correction_low": 0.5}, "a lower bound belongs to loss.correction=mask"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ConfigError) as error:
        kind(**options)
    assert message in str(error.value)


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="PPO has no option clip"):
        PPO(clip=0.2)


def test_k1_in_the_loss_warns_once(caplog):
    with caplog.at_level(logging.WARNING):
        loss = PPO(kl=KLConfig(0.1, KLEstimator.k1))
        loss(torch.tensor([-1.0]), tokens_of([1], logprobs=[-1], advantages=[1], ref_logprobs=[-1]))
    assert [record.message[:24] for record in caplog.records] == ["loss.kl.estimator=k1 in "]
    caplog.clear()
    for quiet in (KLConfig(0.0, KLEstimator.k1), KLConfig(0.1), KLConfig(0.1, KLEstimator.k1, KLPlace.reward)):
        PPO(kl=quiet)
    assert not caplog.records


def test_the_choices_of_the_configuration_are_accepted():
    assert {PPO(correction=choice).correction for choice in Correction} == {"none", "truncate", "mask"}
