"""Problems from JSONL and Parquet files: training and held-out records, each prompt once."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from conf.closed import ConfigError
from conf.environments import FileEnvironmentConfig
from datum.errors import DataError
from datum.rows import Row, read_records
from recipes.environments.environment import Problem, first

__all__ = ["read_problems"]

_SPLIT_SEED = 20250101


def read_problems(
    config: FileEnvironmentConfig, to_problem: Callable[[Row], Problem]
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, in the order of the files.

    Args:
        config: Paths and sizes. The held-out share of `eval_fraction` depends on the files alone.
        to_problem: Makes a problem of one record, or raises a DataError that names its place.

    Raises:
        DataError: A file that cannot be read, no records, or a prompt that is there twice; names file and line.
        ConfigError: More problems are asked for than there are.
    """
    rows = list(_records(config.path))
    held = list(_records(config.eval_path)) if config.eval_path is not None else []
    if config.eval_fraction > 0:
        from datum.encode import hold_out  # imports torch, which the process that computes rewards does without

        try:
            rows, held = hold_out(rows, config.eval_fraction, _SPLIT_SEED)
        except DataError as error:
            raise DataError(f"{config.path}: {str(error).replace('data.eval', 'environment.eval')}") from error
    places: dict[str, str] = {}
    train, heldout = ([_unique(to_problem(row), row.where, places) for row in part] for part in (rows, held))
    return (
        first(train, config.train_size, "environment.train_size"),
        first(heldout, config.eval_size, "environment.eval_size"),
    )


def _records(path: Any) -> Iterator[Row]:
    for row in read_records(path):
        if row.weight != 1:
            raise ConfigError(f"environment.path: {row.where} has weight {row.weight:g}; files of problems have none")
        yield row


def _unique(problem: Problem, where: str, places: dict[str, str]) -> Problem:
    prompt = json.dumps(problem.messages, sort_keys=True, default=str)
    if prompt in places:
        raise DataError(
            f"{where}: the prompt is that of {places[prompt]}; every prompt is asked once, and none that is held out "
            "is trained, so remove one of them"
        )
    places[prompt] = where
    return problem
