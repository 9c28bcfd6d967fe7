"""Options of the shipped environments: one dataclass each (docs/environments.md). This module imports no torch."""

from dataclasses import dataclass

from conf.closed import ConfigError
from conf.policy import EnvironmentConfig

__all__ = ["LargestDigitConfig"]


@dataclass
class LargestDigitConfig(EnvironmentConfig):
    """Which is the largest of a few digits: offline, a few tokens, learnt in seconds."""

    _target_: str = "recipes.environments.largest_digit.build"
    digits: int = 3  # digits a question

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.digits <= 5:
            raise ConfigError(f"environment.digits={self.digits}: accepted are whole numbers from 2 to 5")
