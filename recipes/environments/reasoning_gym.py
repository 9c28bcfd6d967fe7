"""Any task of reasoning-gym by its name: procedural problems, scored by the task that made them."""

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from conf.closed import ConfigError
from conf.environments import ReasoningGymConfig
from recipes.environments.environment import Environment, Problem, chat, parse_rewards
from recipes.environments.formats import answer_of

__all__ = ["build", "score"]

try:
    import reasoning_gym
except ImportError:  # an extra; `build` says how to install it
    reasoning_gym = None

_TRAIN, _HELD_OUT = 1024, 64
_CHUNK = 256  # problems made at a time
_FRUITLESS_CHUNKS = 20  # chunks without a new question, after which a task counts as exhausted
_HELD_OUT_SEED = 20250101  # whatever the run's seed is, the same problems are held out
_SEEDS_APART = 1_000_000


def build(config: ReasoningGymConfig, seed: int) -> Environment:
    """Problems of a task; no question is there twice, so no held-out one is trained.

    Raises:
        ConfigError: The package is missing, there is no such task, it refuses its options, or it has too few questions.
    """
    _require(config)
    seen: set[str] = set()
    held_out = _problems(config, _HELD_OUT_SEED, config.eval_size or _HELD_OUT, "eval_size", seen)
    start = _HELD_OUT_SEED + _SEEDS_APART * (1 + seed % _SEEDS_APART)
    train = _problems(config, start, config.train_size or _TRAIN, "train_size", seen)
    return Environment("reasoning_gym", train, held_out, parse_rewards(config.rewards))


def score(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The task's own score, 0 to 1, of the completion or of what stands in its `<answer>` tags."""
    return [
        float(_task(row["task"], json.dumps(row["options"])).score_answer(answer_of(completion), row["entry"]))
        for completion, row in zip(completions, rows, strict=True)
    ]


def _require(config: ReasoningGymConfig) -> None:
    """Refuse a missing package, an unknown task and options that the task does not take."""
    if reasoning_gym is None:
        raise ConfigError("environment=reasoning_gym needs reasoning-gym: pip install reasoning-gym")
    tasks = reasoning_gym.factory.DATASETS
    if config.task not in tasks:
        near = difflib.get_close_matches(config.task, tasks, n=1, cutoff=0.5)
        raise ConfigError(
            f"environment.task={config.task}: there is no such task in reasoning-gym"
            + (f", did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(tasks))}")
        )
    try:
        _made(config, seed=0)
    except (TypeError, AssertionError, ValueError) as error:  # its ways to refuse an option
        raise ConfigError(f"environment.options={config.options} of the task {config.task}: {error}") from error


def _problems(config: ReasoningGymConfig, seed: int, wanted: int, size_key: str, seen: set[str]) -> list[Problem]:
    """`wanted` problems with questions that are not in `seen`, which grows."""
    problems: list[Problem] = []
    fruitless = 0
    while fruitless < _FRUITLESS_CHUNKS:
        before = len(problems)
        dataset = _made(config, seed)
        for index in range(_CHUNK):
            if len(problems) == wanted:
                return problems
            entry = dataset[index]
            question = entry["question"].strip()
            if question not in seen:
                seen.add(question)
                problems.append(_problem(config, f"{config.task} {seed + index}", question, entry))
        seed += _CHUNK
        fruitless = fruitless + 1 if len(problems) == before else 0
    raise ConfigError(
        f"environment.{size_key}={wanted}: the task {config.task} with the options {config.options} has too few "
        f"different questions, {len(problems)} were found; lower it, or widen environment.options"
    )


def _problem(config: ReasoningGymConfig, id: str, question: str, entry: Mapping[str, Any]) -> Problem:
    row = {"task": config.task, "options": config.options, "entry": dict(entry), "answer": str(entry["answer"])}
    return Problem(id, chat(question, config.system_prompt), row)


def _made(config: ReasoningGymConfig, seed: int) -> Any:
    return reasoning_gym.create_dataset(config.task, size=_CHUNK, seed=seed, **config.options)


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Any:
    """The task as it was made; some score by their options."""
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
