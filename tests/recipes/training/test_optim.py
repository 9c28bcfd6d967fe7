"""Optimizer groups and learning rates."""

import pytest
import torch
from torch import nn

from conf.schema import DecayingSchedulerConfig, OptimConfig, SchedulerConfig, WSDSchedulerConfig
from recipes.training.optim import build_optimizer, learning_rates


class Toy(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_norms_biases_and_embeddings_are_not_decayed(tied: bool) -> None:
    model = Toy(tied)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert names == ({"body.weight"} if tied else {"body.weight", "head.weight"})
    every = [p for group in optimizer.param_groups for p in group["params"]]
    assert len({id(p) for p in every}) == len(every) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    model = Toy(tied=False)
    model.embed.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig())
    assert all(p is not model.embed.weight for group in optimizer.param_groups for p in group["params"])
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model, OptimConfig())


def test_warmup_counts_optimizer_steps_and_linear_ends_above_zero() -> None:
    rate = learning_rates(DecayingSchedulerConfig(name="linear", warmup_steps=4), 1.0, 8)
    assert [rate(k) for k in range(8)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25])


def test_each_schedule_has_its_own_shape() -> None:
    shapes = {
        "constant": SchedulerConfig(name="constant", warmup_steps=0),
        "linear": DecayingSchedulerConfig(name="linear", warmup_steps=0),
        "cosine": DecayingSchedulerConfig(name="cosine", warmup_steps=0),
        "wsd": WSDSchedulerConfig(name="wsd", warmup_steps=0, decay_fraction=0.5),
    }
    rates = {name: [learning_rates(config, 2.0, 8)(k) for k in range(8)] for name, config in shapes.items()}
    assert rates["constant"] == [2.0] * 8
    assert rates["wsd"] == pytest.approx([2.0] * 5 + [1.5, 1.0, 0.5])
    assert rates["cosine"][4] == pytest.approx(1.0)
    assert rates["linear"][4] == pytest.approx(1.0)
    assert rates["cosine"][2] == pytest.approx(1 + 0.5**0.5)
    assert rates["linear"][2] == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_min_ratio_is_the_floor(name: str) -> None:
    rate = learning_rates(DecayingSchedulerConfig(name=name, min_ratio=0.1, warmup_steps=2), 1.0, 10)
    assert min(rate(k) for k in range(2, 10)) > 0.1
    assert rate(10) == pytest.approx(0.1)
    assert rate(50) == pytest.approx(0.1)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.name=step"):
        learning_rates(SchedulerConfig(name="step"), 1.0, 10)


def test_fused_adamw_steps() -> None:
    model = Toy(tied=False)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    before = model.body.weight.detach().clone()
    model.body(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.body.weight)
