"""Options of the shipped environments: one dataclass each (docs/environments.md). This module imports no torch."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from conf.closed import ConfigError
from conf.policy import EnvironmentConfig
from conf.ranges import check_paths, fraction

__all__ = [
    "ArithmeticConfig",
    "CalculatorConfig",
    "FileEnvironmentConfig",
    "LargestDigitConfig",
    "MathConfig",
    "ReasoningGymConfig",
    "RowsConfig",
]

OPERATIONS = ("+", "-", "*")


@dataclass
class LargestDigitConfig(EnvironmentConfig):
    """Which is the largest of a few digits: offline, a few tokens, learnt in seconds."""

    _target_: str = "recipes.environments.largest_digit.build"
    digits: int = 3  # digits a question

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("environment.digits", self.digits, 2, 5)


@dataclass
class ArithmeticConfig(EnvironmentConfig):
    """Sums, differences and products of two whole numbers, offline."""

    _target_: str = "recipes.environments.arithmetic.build"
    operations: list[str] = field(default_factory=lambda: ["+"])  # of +, -, *
    max_operand: int = 20  # numbers from 0 to this one

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("environment.max_operand", self.max_operand, 1, 10**9)
        if (
            not self.operations
            or len(set(self.operations)) < len(self.operations)
            or set(self.operations) - {*OPERATIONS}
        ):
            raise ConfigError(
                f"environment.operations={self.operations}: accepted is a list of different ones of +, -, *, for "
                "example 'environment.operations=[+,\"*\"]'"
            )


@dataclass
class CalculatorConfig(EnvironmentConfig):
    """Arithmetic with a calculator that the model may call before it answers: several turns, offline."""

    _target_: str = "recipes.environments.calculator.build"
    max_operand: int = 99  # numbers from 2 to this one
    max_turns: int = 2  # completions a rollout: tool calls and the answer

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("environment.max_operand", self.max_operand, 4, 10**9)
        _between("environment.max_turns", self.max_turns, 2, 16)


@dataclass
class ReasoningGymConfig(EnvironmentConfig):
    """Problems of a reasoning-gym task, made as they are needed and scored by the task itself."""

    _target_: str = "recipes.environments.reasoning_gym.build"
    task: str = MISSING  # name of a reasoning-gym task, for example chain_sum
    options: dict[str, Any] = field(default_factory=dict)  # of the task, for example {min_terms: 2, max_terms: 3}


@dataclass
class FileEnvironmentConfig(EnvironmentConfig):
    """Problems from files."""

    path: Any = MISSING  # file, folder or glob of JSONL or Parquet, or a list of them
    eval_path: Any = None  # held-out problems, in the same forms
    eval_fraction: float = 0.0  # share of the problems of `path` that is held out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_paths("environment.path", self.path)
        if self.eval_path is not None:
            check_paths("environment.eval_path", self.eval_path)
        fraction("environment.eval_fraction", self.eval_fraction)
        if self.eval_path is not None and self.eval_fraction > 0:
            raise ConfigError(
                "environment.eval_path and environment.eval_fraction are both set: choose one source of "
                "held-out problems"
            )
        if self.eval_size is not None and self.eval_path is None and self.eval_fraction == 0:
            raise ConfigError(
                f"environment.eval_size={self.eval_size}: there are no held-out problems; give environment.eval_path "
                "or environment.eval_fraction"
            )


@dataclass
class MathConfig(FileEnvironmentConfig):
    """Word problems with a final answer (GSM8K form), compared by value with math-verify."""

    _target_: str = "recipes.environments.math.build"
    question_key: str = "question"  # column of the problem
    answer_key: str = "answer"  # column of the solution; the answer is what follows its last ####, else all of it


@dataclass
class RowsConfig(FileEnvironmentConfig):
    """Prompts of your own; rewards read every column of their row."""

    _target_: str = "recipes.environments.rows.build"


def _between(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}={value}: accepted are whole numbers from {low} to {high}")
