"""Two numbers and an operation: "What is 12 + 7?" -> "19". Held-out pairs of numbers are trained in neither order."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from conf.closed import ConfigError
from conf.environments import ArithmeticConfig
from recipes.environments.environment import Environment, Problem, chat, first, parse_rewards
from recipes.environments.formats import answer_of
from recipes.environments.pairs import split_pairs

__all__ = ["build", "correct", "warm_up_rows"]

_TRAIN = 4096  # problems, if `train_size` does not say
_HELD_OUT, _HELD_OUT_SHARE = 128, 0.2  # problems, and at most this share of the pairs, if `eval_size` does not say


def build(config: ArithmeticConfig, seed: int) -> Environment:
    """Every operation on the training pairs in both orders; each held-out pair once. A difference is never negative.

    Raises:
        ConfigError: More problems are asked for than there are.
    """
    numbers = config.max_operand + 1
    pairs = numbers * (numbers + 1) // 2
    held_out = min(_HELD_OUT, int(_HELD_OUT_SHARE * pairs)) if config.eval_size is None else config.eval_size
    if held_out >= pairs:
        raise ConfigError(
            f"environment.eval_size={config.eval_size}: there are {pairs} pairs of numbers from 0 to "
            f"{config.max_operand}, and some must be left for training"
        )
    train, heldout = split_pairs(0, config.max_operand, config.train_size or _TRAIN, held_out, seed)
    rng = random.Random(seed)
    asked = [
        (*order, operation)
        for pair in train
        for operation in config.operations
        for order in sorted({pair, pair[::-1]})
        if operation != "-" or order[0] >= order[1]
    ]
    rng.shuffle(asked)
    problems = [_problem(*operands, config.system_prompt) for operands in asked]
    choice = random.Random("held out")
    return Environment(
        "arithmetic",
        first(problems if config.train_size else problems[:_TRAIN], config.train_size, "environment.train_size"),
        [_held_out(pair, choice, config) for pair in heldout],
        parse_rewards(config.rewards),
        demonstrate=_demonstrate,
    )


def correct(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 for the number alone, or alone between `<answer>` tags; else 0."""
    return [float(answer_of(completion) == row["answer"]) for completion, row in zip(completions, rows, strict=True)]


def warm_up_rows(seed: int) -> list[dict[str, Any]]:
    """Chat rows of the default environment's training problems, half of them with a wrong answer."""
    config = ArithmeticConfig(rewards={"correct": {"function": f"{__name__}.correct"}})
    return build(config, seed).warm_up_rows(seed)


def _held_out(pair: tuple[int, int], rng: random.Random, config: ArithmeticConfig) -> Problem:
    operation = rng.choice(config.operations)
    smaller, larger = pair
    swapped = rng.random() < 0.5 or operation == "-"
    return _problem(*((larger, smaller) if swapped else pair), operation, config.system_prompt)


def _problem(left: int, right: int, operation: str, system_prompt: str | None) -> Problem:
    return Problem(
        f"{left} {operation} {right}",
        chat(f"What is {left} {operation} {right}?", system_prompt),
        {"left": left, "right": right, "operation": operation, "answer": str(_result(left, right, operation))},
    )


def _result(left: int, right: int, operation: str) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def _demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Half of the answers are right, half are those of other numbers of the same size."""
    row = problem.row
    answer = row["answer"]
    if rng.random() < 0.5:
        high = max(row["left"], row["right"])
        larger, smaller = sorted((rng.randint(0, high), rng.randint(0, high)), reverse=True)
        answer = str(_result(larger, smaller, row["operation"]))
    return [{"role": "assistant", "content": answer}]
