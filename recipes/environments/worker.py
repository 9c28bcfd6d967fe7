"""The process that computes rewards: it reads calls from a socket and answers each, and imports no torch.

`recipes.environments.rewards` starts it. Functions run in its main thread, one at a time, so that those which set
signal alarms work. What they print goes to the standard error stream; the socket is a file descriptor of its own, so
printing disturbs nothing. It is in a session of its own: Ctrl-C does not reach it, and killing it kills what it has
started.
"""

import contextlib
import numbers
import os
import pickle
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["serve"]

_ORPHAN_CHECK_S = 0.5


def serve(descriptor: int, parent: int) -> None:
    """Answer calls until the other end closes.

    The first message is a pickled mapping of names to functions or their dotted names, answered by `("ready", None)`
    or `("failed", reason)`. Each further one is `(name, completions, rows)`, answered by one of

        ("rewards", list of float | None)      as many as completions; not necessarily finite
        ("shape", what was returned)           not one number or None a completion
        ("raised", (kind, text))               the function raised
    """
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        functions = {
            name: pkgutil.resolve_name(function) if isinstance(function, str) else function
            for name, function in pickle.loads(connection.recv_bytes()).items()
        }
    except EOFError:
        return
    except BaseException as error:  # importing a module runs it, so anything may come
        connection.send(("failed", _described(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            name, completions, rows = connection.recv()
        except (EOFError, OSError):
            return
        answer = _call(functions[name], completions, rows)
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


def _call(function: Any, completions: list[str], rows: list[Mapping[str, Any]]) -> tuple[str, Any]:
    wanted = len(completions)  # before the function gets hold of the list
    try:
        return _checked(function(completions, rows), wanted)
    except BaseException as error:  # SystemExit too: a reward never ends the run
        return "raised", (type(error).__name__, _described(error))
    finally:
        with contextlib.suppress(ValueError):
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would strike in the next call
        with contextlib.suppress(Exception):
            sys.stdout.flush()


def _checked(returned: Any, wanted: int) -> tuple[str, Any]:
    """Rewards as plain floats, or what is wrong with them."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()  # arrays and tensors
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        return "shape", f"expected {wanted} rewards in a list, got {_shown(returned)}"
    if len(returned) != wanted:
        return "shape", f"expected {wanted} rewards, got {len(returned)}"
    rewards = []
    for place, value in enumerate(returned):
        if hasattr(value, "tolist"):
            value = value.tolist()
        if value is not None and not isinstance(value, numbers.Real):
            return "shape", f"expected {wanted} rewards, each a number or None, got {_shown(value)} for [{place}]"
        rewards.append(None if value is None else float(value))
    return "rewards", rewards


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _described(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, the place being the innermost one."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else text


def _follow(parent: int) -> None:
    """End this process when the one that started it is gone, even in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
