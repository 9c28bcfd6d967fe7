"""The demo's task: "Which is the largest of 3, 7, 5?", where a supervised warm-up teaches the form but not the answer.

Held out are combinations, the same share of every answer's: none of their orders is trained. Which ones they are
depends on no seed, so a model that was warmed up in another run has seen none of them either.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement, permutations
from typing import Any

from conf.closed import ConfigError
from conf.environments import LargestDigitConfig
from recipes.environments.environment import Environment, Problem, chat, parse_rewards

__all__ = ["build", "correct", "warm_up_rows"]

_DIGITS = range(10)
_HELD_OUT = 0.2  # share of the combinations, if `eval_size` does not say
_SPLIT_SEED = 20250101


def build(config: LargestDigitConfig, seed: int) -> Environment:
    """Questions in all orders of the combinations that are not held out; each held-out combination in one order.

    Raises:
        ConfigError: More problems are asked for than there are.
    """
    return Environment(
        "largest_digit",
        *_problems(config.digits, config.train_size, config.eval_size, seed, config.system_prompt),
        rewards=parse_rewards(config.rewards),
        demonstrate=_demonstrate,
    )


def correct(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 for the largest digit alone, white space around it apart; else 0."""
    return [float(completion.strip() == row["answer"]) for completion, row in zip(completions, rows, strict=True)]


def warm_up_rows(seed: int) -> list[dict[str, Any]]:
    """Chat rows of the default environment's training problems; the answer is a random one of the digits."""
    config = LargestDigitConfig(rewards={"correct": {"function": f"{__name__}.correct"}})
    return build(config, seed).warm_up_rows(seed)


def _problems(
    count: int, train_size: int | None, eval_size: int | None, seed: int, system_prompt: str | None
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems."""
    combinations = list(combinations_with_replacement(_DIGITS, count))
    split = random.Random(_SPLIT_SEED)
    split.shuffle(combinations)
    combinations.sort(key=_place_among_equals(combinations))
    held_out = round(_HELD_OUT * len(combinations)) if eval_size is None else eval_size
    if held_out >= len(combinations):
        raise ConfigError(
            f"environment.eval_size={eval_size}: there are {len(combinations)} combinations of {count} digits, and "
            "some must be left for training"
        )
    heldout = [_problem(split.sample(digits, count), system_prompt) for digits in combinations[:held_out]]
    ordered = [order for digits in combinations[held_out:] for order in sorted(set(permutations(digits)))]
    random.Random(seed).shuffle(ordered)
    if train_size is not None and train_size > len(ordered):
        raise ConfigError(f"environment.train_size={train_size}: there are {len(ordered)} questions to train on")
    return [_problem(digits, system_prompt) for digits in ordered[:train_size]], heldout


def _place_among_equals(combinations: Sequence[Sequence[int]]) -> Callable[[Sequence[int]], float]:
    """Key by which the first n of the combinations hold about the same share of every answer, rounded down.

    Otherwise chance would hold out all that have 0 or 1 as their answer, since they are few.
    """
    places: dict[Sequence[int], float] = {}
    for answer in _DIGITS:
        equals = [digits for digits in combinations if max(digits) == answer]
        places |= {digits: (number + 1) / len(equals) for number, digits in enumerate(equals)}
    return places.__getitem__


def _problem(digits: Sequence[int], system_prompt: str | None) -> Problem:
    listed = ", ".join(map(str, digits))
    return Problem(
        listed,
        chat(f"Which is the largest of {listed}?", system_prompt),
        {"digits": list(digits), "answer": str(max(digits))},
    )


def _demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": str(rng.choice(problem.row["digits"]))}]
