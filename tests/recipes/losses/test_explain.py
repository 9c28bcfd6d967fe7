"""The printed objective: names every denominator and option in use, with numbers that the loss computed."""

import pytest

from conf.policy import ADVANTAGES, KLConfig, KLEstimator, KLPlace
from recipes.losses.cispo import CISPO
from recipes.losses.cross_entropy import CrossEntropy
from recipes.losses.dro import DRO
from recipes.losses.explain import objective_text, on_policy_note, worked_example
from recipes.losses.gspo import GSPO
from recipes.losses.importance_sampling import ImportanceSampling
from recipes.losses.ppo import PPO

LOSSES = [
    ImportanceSampling(),
    PPO(),
    PPO(clip_high=0.28),
    PPO(dual_clip=3.0),
    CISPO(),
    GSPO(),
    GSPO(variant="token"),
    DRO(),
    CrossEntropy(),
]


def text_of(loss, advantage="grpo", **options):
    return objective_text(loss, advantage, **{"group_size": 8, "samples": 64} | options)


def test_the_text_in_full():
    loss = PPO(aggregation="constant", max_tokens=16, correction="truncate", kl=KLConfig(0.1))
    assert text_of(loss).splitlines() == [
        "loss = sum of w l over the step's trained tokens / "
        "(the step's sequences, 64 where no group is dropped, x 16)  (aggregation=constant)",
        "up to 64 completions a step, 8 a prompt; counts run over all microbatches and ranks",
        "l = rho * [-min(r A, clip(r, 0.8, 1.2) A)] + 0.1 (exp(ref - p) - (ref - p) - 1)",
        "r = exp(p - o)",
        "rho = min(exp(o - b), 2), a constant",
        "A = (R - mean of its group) / (sample std of its group + 1e-06)  (advantage=grpo)",
        "R = reward of the completion",
        "p, b: log-probability of the token under the model in training, and under the sampler",
        "o: under the trainer before the batch's first update, where that is computed, else b; sg(): as a constant",
    ]


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (ImportanceSampling(), "-r A"),
        (PPO(clip_high=0.28, dual_clip=3.0), "-min(r A, clip(r, 0.8, 1.28) A), but for A < 0 at most 3 |A|"),
        (CISPO(), "-sg(clip(r, 0, 5)) A p"),
        (GSPO(), "-min(r A, clip(r, 0.9997, 1.0004) A)"),
        (DRO(beta=0.05), "-(A p - 0.025 (p - o)^2)"),
    ],
)
def test_formulas_hold_the_options(loss, formula):
    assert f"l = [{formula}]" in text_of(loss).splitlines()


def test_each_choice_has_its_own_text():
    texts = [text_of(loss) for loss in LOSSES]
    texts += [text_of(PPO(aggregation=mode)) for mode in ("sequence", "sum")]
    texts += [text_of(PPO(), name) for name in ADVANTAGES if name != "grpo"]
    texts += [text_of(PPO(), std="population"), text_of(PPO(), eps=0.0)]
    texts += [text_of(PPO(kl=KLConfig(0.1, KLEstimator(name)))) for name in ("k2", "k3")]
    texts += [text_of(PPO(kl=KLConfig(0.1, KLEstimator.k1, KLPlace.reward)))]
    texts += [
        text_of(PPO(correction=c, correction_level=x)) for c in ("truncate", "mask") for x in ("token", "sequence")
    ]
    assert len(set(texts)) == len(texts)
    assert all(len(line) <= 120 for text in texts for line in text.splitlines())


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradients"),
    [
        # lengths 1, 3, 2 and 2, 2, 2; advantages 2/3, -1/3, -1/3 and 0, 0, 0
        ("token", "(-2/3 + 3/3 + 2/3) / 12", "[-0.0556, 0.0278, 0.0278]  [0, 0, 0]"),
        ("sequence", "0", "[-0.1111, 0.0185, 0.0278]  [0, 0, 0]"),
    ],
)
def test_the_example_is_computed_by_the_loss(aggregation, loss, gradients):
    text = worked_example(PPO(aggregation=aggregation), "group_mean").splitlines()
    assert text[2] == "  advantages   [0.6667, -0.3333, -0.3333]  [0, 0, 0]"
    assert text[3] == f"  loss         {f'{eval(loss):.4f}' if loss != '0' else loss}"
    assert text[4] == f"  d loss / d p {gradients}  (at each token of the completion)"
    assert text[5] == "  the second group's rewards are equal: its advantages are exactly 0"


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("loss", LOSSES[:-1], ids=lambda loss: type(loss).__name__)
def test_every_loss_has_an_example(loss, name):
    text = worked_example(loss, name)
    assert ("exactly 0" in text) == (name not in ("none", "reinforce_pp"))
    assert "nan" not in text


def test_the_note_is_one_line():
    assert "\n" not in on_policy_note()
    assert "train/grad_norm" in on_policy_note()
