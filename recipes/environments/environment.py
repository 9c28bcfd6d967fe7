"""What a policy is trained on: problems, the rewards that judge an answer, and what is said back in between.

An environment is data and functions, nothing that learns. The loop (`recipes.grpo`) samples completions of a problem's
messages, asks `reply` whether the conversation goes on, and gives the text of the last turn to the rewards
(`recipes.environments.rewards`).

    Problem("7", ({"role": "user", "content": "Which is the largest of 3, 7, 5?"},), {"answer": "7"})

This module imports no torch: the process that computes rewards imports it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.closed import ConfigError

__all__ = ["Environment", "Problem", "RewardFunction", "WeightedReward", "chat", "first", "parse_rewards"]

RewardFunction = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float | None]]
"""`(completions, rows)` -> one reward a completion, in their order; None abstains.

A completion is the text of a rollout's last turn, without the token that ends it; a row is the problem's.
"""

Demonstrate = Callable[["Problem", random.Random], list[dict[str, Any]]]
"""`(problem, rng)` -> the messages of one conversation that follows the problem's own."""


@dataclass(frozen=True)
class Problem:
    """One prompt.

    Attributes:
        id: Tells it from the environment's other problems.
        messages: The conversation up to the first completion; neither empty nor ending with the assistant.
        row: What rewards read beside the completion; plain values, since they cross to another process.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...]
    row: Mapping[str, Any]


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its share in the sum.

    Attributes:
        function: Dotted name of a `RewardFunction`, or one itself, defined at the top of a module.
        weight: Factor in the sum; 0 measures the reward without training on it.
    """

    function: str | RewardFunction
    weight: float = 1.0


@dataclass
class Environment:
    """Problems and how an answer to them is judged. Subclass it to hold a conversation of several turns.

    Attributes:
        name: For messages and logs.
        train: Problems for training.
        heldout: Problems for evaluation, none of which is in `train`; may be empty.
        rewards: Rewards by name. The first is the verdict: evaluations report it as accuracy.
        max_turns: Completions of one rollout at most.
        demonstrate: Example conversations for a supervised warm-up; None: there are none.
    """

    name: str
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: Mapping[str, WeightedReward]
    max_turns: int = 1
    demonstrate: Demonstrate | None = None

    def reply(self, problem: Problem, completions: Sequence[str]) -> list[dict[str, Any]] | None:
        """Messages that follow the last of a rollout's completions (roles tool or user); None ends the rollout.

        Called for a completion that ended by itself and is not the last of `max_turns`. It depends on its arguments
        alone, so that a resumed run continues as the uninterrupted one would have.
        """
        return None

    def warm_up_rows(self, seed: int) -> list[dict[str, Any]]:
        """Chat rows of the training problems, for supervised fine-tuning that teaches the form of an answer.

        Raises:
            ConfigError: The environment has no demonstrations.
        """
        if self.demonstrate is None:
            raise ConfigError(
                f"environment={self.name} has no demonstrations to warm up on: start from a model that already answers "
                "in the form that the rewards read"
            )
        rng = random.Random(f"warm-up {seed}")
        return [{"messages": [*problem.messages, *self.demonstrate(problem, rng)]} for problem in self.train]


def chat(question: str, system_prompt: str | None = None) -> tuple[dict[str, str], ...]:
    """Messages that ask one question, after a system prompt if there is one."""
    opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return (*opening, {"role": "user", "content": question})


def parse_rewards(rewards: Mapping[str, Mapping[str, Any]]) -> dict[str, WeightedReward]:
    """The option `environment.rewards` as rewards; a weight that is left out is 1.

    Raises:
        ConfigError: No reward has a weight.
    """
    parsed = {
        str(name): WeightedReward(entry["function"], float(entry.get("weight", 1.0))) for name, entry in rewards.items()
    }
    if not any(reward.weight for reward in parsed.values()):
        raise ConfigError(
            f"environment.rewards={dict(rewards)}: every weight is 0, so there is nothing to train on; give "
            "one of them a weight"
        )
    return parsed


def first(problems: Sequence[Problem], count: int | None, key: str) -> list[Problem]:
    """The first `count` problems; None: all.

    Raises:
        ConfigError: There are fewer; names the option `key`.
    """
    if count is not None and count > len(problems):
        raise ConfigError(f"{key}={count}: there are {len(problems)} problems; lower it, or leave it out to take all")
    return list(problems[:count])
