"""Reward functions as users write them, the broken ones too. The worker process of the tests imports this module."""

import os
import signal
import sys
import time

SLOW = "slow"


def length(completions, rows):
    return [len(completion) for completion in completions]


def same(completions, rows):
    return [float(completion == row["answer"]) for completion, row in zip(completions, rows)]


def one_for_all(completions, rows):
    return [1.0]


def a_number(completions, rows):
    return 1.0


def texts(completions, rows):
    return ["good"] * len(completions)


def array(completions, rows):
    import numpy as np

    return np.arange(len(completions), dtype=np.float32)


def hangs(completions, rows):
    while any(completion == "hang" for completion in completions):
        pass
    return [1] * len(completions)


def slow(completions, rows):
    is_slow = "slow" in completions
    time.sleep(1.0 if is_slow else 0.0)
    return [99 if is_slow else 1] * len(completions)


def hangs_with_a_child(completions, rows):
    if "hang" in completions:
        import subprocess

        child = subprocess.Popen(["sleep", "60"])
        with open(rows[0]["pid_file"], "w") as file:  # noqa: PTH123
            file.write(str(child.pid))
        time.sleep(60)
    return [1] * len(completions)


def raises(completions, rows):
    return [1 / (completion != "bad") for completion in completions]


def exits(completions, rows):
    if "bad" in completions:
        sys.exit(3)
    return [1] * len(completions)


def dies(completions, rows):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1] * len(completions)


def not_finite(completions, rows):
    return [float(completion) for completion in completions]


def abstains(completions, rows):
    return [None if completion == "unsure" else 1.0 for completion in completions]


def prints(completions, rows):
    print("a line", flush=True)
    os.write(1, b"bytes\n" * 1000)
    input_is_empty = sys.stdin.read() == ""
    return [float(input_is_empty)] * len(completions)


def uses_alarms(completions, rows):
    def stop(*_):
        raise TimeoutError("too slow")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # left armed by the good ones
    if "hang" in completions:
        time.sleep(5)
    return [1] * len(completions)


def misses_a_column(completions, rows):
    return [float(row["solution"] == completion) for completion, row in zip(completions, rows)]


def changes_its_rows(completions, rows):
    for row in rows:
        row["answer"] = None
    return [0] * len(completions)


def imports_torch(completions, rows):
    return [float("torch" in sys.modules)] * len(completions)


def process_id(completions, rows):
    return [os.getpid()] * len(completions)


def only_completions(completions):
    return [0.0] * len(completions)


def takes_one_away(completions, rows):
    completions.pop()
    return [1.0] * len(completions)


def adds_numbers_to_texts(completions, rows):
    return [completion + 1 for completion in completions]


def hangs_always(completions, rows):
    while True:
        pass
