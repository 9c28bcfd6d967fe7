"""Rewards of completions, computed in a process of their own that may be killed.

A function that fails says nothing about the completion, so a failure is no reward of 0: the completion abstains and is
counted. That holds for an exception, a timeout, a dead process, and a reward that is not a finite number. A function of
the wrong shape is a mistake in the program and ends the run.

    runner = RewardRunner({"correct": WeightedReward("my_rewards.score")}, timeout_s=10, allow_targets=["my_rewards"])
    scores = runner.score(["7", "5"], [row, row])        # scores.total == [1.0, 0.0]
"""

import contextlib
import inspect
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from conf.closed import ConfigError
from recipes.environments.environment import RewardFunction, WeightedReward
from recipes.runtime.build import locate

__all__ = ["RewardRunner", "RewardShapeError", "Scores"]

log = logging.getLogger(__name__)

_START_S = 120.0  # importing a function's module; not part of any call's timeout
_DRY_COMPLETIONS = 3  # more than one, so that a function which returns a single reward is found
# Kinds of failure whose cause is the program and not a completion, if each call of a trial ends in one.
_BUGS = (
    "KeyError",
    "NameError",
    "ImportError",
    "ModuleNotFoundError",
    "TypeError",
    "AttributeError",
    "timeout",
    "died",
)
_TIMEOUTS = 3  # calls for one completion that may time out before the rest of a batch abstains uncalled

_BOOT = (
    "import sys, json; folders, descriptor, parent = json.loads(sys.argv[1]); sys.path[:] = folders; "
    "from recipes.environments.worker import serve; serve(descriptor, parent)"
)


class RewardShapeError(ConfigError):
    """A reward function did not return one number or None a completion; or it cannot be called at all."""


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of completions, in their order.

    Attributes:
        total: Weighted sum of the rewards that did not abstain; None where all abstained or one failed. A reward of
            weight 0 has no part in it, even if it fails.
        by_name: Each reward unweighted; None where it abstained or failed.
        errors: Calls for one completion that failed: an exception, a timeout, a dead process, a non-finite reward.
    """

    total: list[float | None]
    by_name: dict[str, list[float | None]]
    errors: int


@dataclass(frozen=True)
class _Failure:
    """Why a function gave no reward; `kind` is what one log line stands for."""

    kind: str
    text: str


class RewardRunner:
    """Calls reward functions in one worker process, which starts with the first call and anew after a timeout.

    A function gets all completions of a batch in one call. If that call fails, it is repeated for one completion at a
    time, so that only those abstain which make it fail.

    Args:
        rewards: Functions and weights by name.
        timeout_s: Longest a call may take, be it for the batch or for one completion. Importing is not counted.
        allow_targets: Modules that a dotted name may lie in, beside those of this repository.
        key: Option that holds the rewards, for messages.

    Raises:
        ConfigError: A name that leads nowhere or lies outside the allowed modules, or a function that cannot be called
            with completions and rows.
    """

    def __init__(
        self,
        rewards: Mapping[str, WeightedReward],
        *,
        timeout_s: float,
        allow_targets: Sequence[str] = (),
        key: str = "environment.rewards",
    ):
        self.rewards = dict(rewards)
        self.timeout_s = timeout_s
        self.key = key
        self._labels = {
            name: _checked_name(reward.function, allow_targets, f"{key}.{name}.function")
            for name, reward in self.rewards.items()
        }
        self._functions = pickle.dumps({name: reward.function for name, reward in self.rewards.items()})
        self._worker: _Worker | None = None
        self._lock = threading.Lock()  # rollouts may be sampled in one thread while another evaluates
        self._reported: set[tuple[str, str]] = set()

    def score(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """Reward each completion by its row.

        Raises:
            RewardShapeError: "expected 3 rewards, got 1", with the function's name.
            ValueError: There are not as many rows as completions.
        """
        if len(completions) != len(rows):
            raise ValueError(f"{len(completions)} completions and {len(rows)} rows: every completion needs its own row")
        results = {name: self._results(name, list(completions), list(rows)) for name in self.rewards}
        return Scores(
            total=[self._sum({name: result[i] for name, result in results.items()}) for i in range(len(completions))],
            by_name={
                name: [None if isinstance(value, _Failure) else value for value in result]
                for name, result in results.items()
            },
            errors=sum(isinstance(value, _Failure) for result in results.values() for value in result),
        )

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Call every function on a few rows with made-up completions, so that a mistake shows before training.

        A completion is the row's `answer` where it has one, else empty. Functions may fail on it, as they may on what a
        model writes.

        Raises:
            RewardShapeError: A function returns the wrong shape, or each call for one completion ends in a timeout, a
                dead process, or an exception that no other completion would help (KeyError, TypeError, ...).
        """
        if not rows:
            return
        sample = [rows[i % len(rows)] for i in range(_DRY_COMPLETIONS)]
        completions = [str(row["answer"]) if isinstance(row.get("answer"), str | int | float) else "" for row in sample]
        for name in self.rewards:
            results = self._results(name, completions, sample)
            failures = [result for result in results if isinstance(result, _Failure) and result.kind in _BUGS]
            if len(failures) == len(results):
                raise RewardShapeError(
                    f"{self.key}.{name}: {self._labels[name]} fails on every completion of a trial: {failures[0].text};"
                    f" the rows it is given have the keys {', '.join(sorted(map(str, sample[0]))) or 'none'}"
                )

    def close(self) -> None:
        """End the worker process; a later call would start it again."""
        with self._lock:
            self._kill()

    def _sum(self, values: Mapping[str, Any]) -> float | None:
        weighted = [(self.rewards[name].weight, value) for name, value in values.items() if self.rewards[name].weight]
        if any(isinstance(value, _Failure) for _, value in weighted):
            return None
        terms = [weight * value for weight, value in weighted if value is not None]
        return sum(terms) if terms else None

    def _results(self, name: str, completions: list[str], rows: list[Mapping[str, Any]]) -> list[Any]:
        """float, None (a deliberate abstention) or `_Failure` of each completion."""
        if not completions:
            return []
        with self._lock:
            results = self._call(name, completions, rows)
            if isinstance(results, _Failure):
                if len(completions) == 1:
                    results = [results]
                else:
                    self._report(name, results)
                    results = self._one_by_one(name, completions, rows)
        for place, result in enumerate(results):
            if isinstance(result, float) and not math.isfinite(result):
                results[place] = _Failure("non-finite", f"returned {result}")
            if isinstance(results[place], _Failure):
                self._report(name, results[place])
        return results

    def _one_by_one(self, name: str, completions: list[str], rows: list[Mapping[str, Any]]) -> list[Any]:
        """Results of calls for one completion each; after some timeouts nobody waits for more of them."""
        results: list[Any] = []
        timeouts = 0
        for completion, row in zip(completions, rows, strict=True):
            if timeouts == _TIMEOUTS:
                results.append(_Failure("timeout", f"timed out {_TIMEOUTS} times in a batch and was not called again"))
                continue
            result = self._call(name, [completion], [row])
            is_failure = isinstance(result, _Failure)
            timeouts += is_failure and result.kind == "timeout"
            results.append(result if is_failure else result[0])
        return results

    def _call(self, name: str, completions: list[str], rows: list[Mapping[str, Any]]) -> Any:
        """A list of rewards, or a `_Failure` of the whole call."""
        try:
            if self._worker is None:
                self._worker = _Worker(self._functions)
            kind, value = self._worker.ask((name, completions, rows), self.timeout_s)
        except TimeoutError:
            self._kill()
            return _Failure("timeout", f"took longer than {self.timeout_s:g} s (environment.timeout_s)")
        except EOFError:
            code = self._kill()
            return _Failure("died", f"ended its process ({_ending(code)})")
        except BaseException:  # the answer to this call must not be taken for that of the next
            self._kill()
            raise
        if kind == "rewards":
            return value
        if kind == "raised":
            return _Failure(value[0], f"raised {value[1]}")
        raise RewardShapeError(
            f"{self.key}.{name}: {self._labels[name]} was called with {len(completions)} completions: {value}; a "
            "reward function returns a list with one number, or None to abstain, for each completion"
        )

    def _report(self, name: str, failure: _Failure) -> None:
        if (name, failure.kind) not in self._reported:
            self._reported.add((name, failure.kind))
            log.warning(
                "reward %s: %s %s. Completions it fails on abstain and are counted in reward/errors; further failures "
                "of this kind are not reported.",
                *(name, self._labels[name], failure.text),
            )

    def _kill(self) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else worker.kill()


class _Worker:
    """One process of `recipes.environments.worker`."""

    def __init__(self, functions: bytes):
        self.connection, theirs = Pipe(duplex=True)
        with theirs:
            descriptor = theirs.fileno()
            folders = [folder or os.getcwd() for folder in sys.path]  # noqa: PTH109
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps([folders, descriptor, os.getpid()])],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        try:
            self.connection.send_bytes(functions)
            kind, reason = _received(self.connection, _START_S)
        except (EOFError, OSError, TimeoutError) as error:
            code = self.kill()
            reason = f"did not start within {_START_S:g} s" if isinstance(error, TimeoutError) else _ending(code)
            raise RuntimeError(f"the process that computes rewards is gone: {reason}") from error
        except BaseException:
            self.kill()
            raise
        if kind == "failed":
            self.kill()
            raise ConfigError(f"the reward functions cannot be imported where rewards are computed: {reason}")

    def ask(self, call: tuple[str, list[str], list[Mapping[str, Any]]], timeout_s: float) -> tuple[str, Any]:
        """Send one call and wait for its answer.

        Raises:
            TimeoutError: It takes longer.
            EOFError: The process ended.
        """
        try:
            message = pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"a problem's row cannot be sent to its rewards, it must hold plain values: {error}"
            ) from error
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise EOFError from error
        return _received(self.connection, timeout_s)

    def kill(self) -> int | None:
        """End the process and what it has started; returns its exit code."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # should it have left its process group
        return self.process.wait()


def _received(connection: Connection, timeout_s: float) -> tuple[str, Any]:
    if not connection.poll(timeout_s):
        raise TimeoutError
    try:
        return connection.recv()
    except ConnectionResetError as error:
        raise EOFError from error


def _checked_name(function: str | RewardFunction, allow_targets: Sequence[str], key: str) -> str:
    """Name of a function, for messages, once it is sure that another process can call it with two arguments."""
    found: Any = locate(function, allow_targets, key=key) if isinstance(function, str) else function
    name = function if isinstance(function, str) else f"{found.__module__}.{getattr(found, '__qualname__', '')}"
    try:
        inspect.signature(found).bind([], [])
    except ValueError:
        pass  # a builtin without a signature: the trial call tells
    except TypeError as error:
        raise RewardShapeError(f"{key}={name}: a reward is called as function(completions, rows): {error}") from error
    if not isinstance(function, str):
        try:
            if found.__module__ == "__main__":
                raise pickle.PicklingError("__main__ is not the main module there")
            pickle.dumps(found)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{key}={name}: rewards are computed in another process, which imports the function by its name; put "
                f"it at the top of a module ({error})"
            ) from error
    return name


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
