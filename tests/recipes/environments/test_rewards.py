"""Rewards: what fails abstains and is counted, never worth 0; the process behind them is killed and comes back."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conf.closed import ConfigError
from recipes.environments.environment import WeightedReward
from recipes.environments.rewards import RewardRunner, RewardShapeError

HERE = "rewards_of_a_user"
ROWS = [{"answer": "a"}, {"answer": "b"}, {"answer": "c"}]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def runner():
    """A call makes a runner of functions of rewards_of_a_user."""
    with contextlib.ExitStack() as stack:

        def make(*names, timeout_s=5.0, **weights):
            rewards = {name: WeightedReward(f"{HERE}.{name}", weights.get(name, 1.0)) for name in names}
            made = RewardRunner(rewards, timeout_s=timeout_s, allow_targets=[HERE])
            stack.callback(made.close)
            return made

        yield make


def test_the_total_is_the_weighted_sum_and_each_reward_stands_apart(runner):
    scores = runner("same", "length", length=-0.5).score(["a", "bb", "c"], ROWS)
    assert scores.by_name == {"same": [1.0, 0.0, 1.0], "length": [1.0, 2.0, 1.0]}
    assert scores.total == [0.5, -1.0, 0.5]
    assert scores.errors == 0


def test_a_reward_that_abstains_is_left_out_of_the_sum_and_is_no_error(runner):
    scores = runner("abstains", "length").score(["unsure", "yes", ""], ROWS)
    assert scores.total == [6.0, 4.0, 1.0]
    alone = runner("abstains").score(["unsure", "yes"], ROWS[:2])
    assert (alone.total, alone.errors) == ([None, 1.0], 0)


def test_an_exception_makes_only_its_completion_abstain(runner, caplog):
    scores = runner("raises", "length").score(["good", "bad", "fine"], ROWS)
    assert scores.total == [5.0, None, 5.0]
    assert scores.by_name == {"raises": [1.0, None, 1.0], "length": [4.0, 3.0, 4.0]}
    assert scores.errors == 1
    (line,) = [record.message for record in caplog.records]  # once, although the batch failed and then the completion
    assert re.search(r"reward raises: rewards_of_a_user.raises raised ZeroDivisionError: .* \(.*user.py:\d+\)", line)
    assert "abstain and are counted in reward/errors" in line


def test_failures_are_reported_once_a_kind(runner, caplog):
    made = runner("not_finite")
    for _ in range(3):
        made.score(["nan", "x"], ROWS[:2])
    assert len(caplog.records) == 2


def test_a_hung_function_is_killed_and_only_the_culprit_abstains(runner, caplog):
    made = runner("hangs", "length", timeout_s=0.5)
    started = time.monotonic()
    scores = made.score(["hang", "fine", "good"], ROWS)
    assert time.monotonic() - started < 4
    assert scores.total == [None, 5.0, 5.0]
    assert scores.errors == 1
    assert "hangs took longer than 0.5 s (environment.timeout_s)" in caplog.text
    assert made.score(["fine"], ROWS[:1]).total == [5.0]  # the next call has a worker


def test_what_a_killed_function_started_is_killed_too(runner, tmp_path):
    row = {"pid_file": str(tmp_path / "pid")}
    assert runner("hangs_with_a_child", timeout_s=0.5).score(["hang"], [row]).total == [None]
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("still running")


@pytest.mark.parametrize(
    ("name", "text"), [("exits", "raised SystemExit: 3"), ("dies", "ended its process (killed by SIGSEGV)")]
)
def test_a_function_that_ends_its_process_ends_nothing_else(runner, caplog, name, text):
    scores = runner(name).score(["good", "bad"], ROWS[:2])
    assert (scores.total, scores.errors) == ([1.0, None], 1)
    assert text in caplog.text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_no_finite_number_is_an_error_not_a_value(runner, value):
    scores = runner("not_finite", "length", length=0.0).score(["2", value], ROWS[:2])
    assert scores.total == [2.0, None]
    assert scores.by_name["not_finite"] == [2.0, None]
    assert scores.errors == 1


def test_a_reward_of_weight_0_is_measured_and_has_no_part_in_the_sum(runner):
    scores = runner("length", "raises", raises=0.0).score(["bad", "fine"], ROWS[:2])
    assert scores.total == [3.0, 4.0]
    assert (scores.by_name["raises"], scores.errors) == ([None, 1.0], 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one_for_all", "called with 3 completions: expected 3 rewards, got 1"),
        ("a_number", "expected 3 rewards in a list, got float 1.0"),
        ("texts", "expected 3 rewards, each a number or None, got str 'good' for [0]"),
    ],
)
def test_a_wrong_shape_is_a_mistake_that_names_the_function(runner, name, text):
    made = runner(name)
    for call in (lambda: made.score(["x", "y", "z"], ROWS), lambda: made.check(ROWS[:1])):
        with pytest.raises(RewardShapeError, match=re.escape(text)) as caught:
            call()
        assert f"environment.rewards.{name}: {HERE}.{name} was" in str(caught.value)
    assert issubclass(RewardShapeError, ConfigError)


def test_arrays_are_lists(runner):
    assert runner("array").score(["x", "y", "z"], ROWS).total == [0.0, 1.0, 2.0]


def test_a_trial_call_finds_what_no_completion_would_help(runner):
    runner("same", "raises", "not_finite").check(ROWS)  # may fail on a made-up completion
    with pytest.raises(RewardShapeError, match=r"fails on every completion of a trial: raised KeyError: 'solution'.*"):
        runner("misses_a_column").check(ROWS)


def test_printing_disturbs_nothing(runner, capfd):
    assert runner("prints").score(["x"], ROWS[:1]).total == [1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "a line" in err


def test_alarms_work_and_do_not_strike_later(runner):
    made = runner("uses_alarms")
    assert made.score(["hang", "fine"], ROWS[:2]).total == [None, 1.0]
    assert made.score(["fine"], ROWS[:1]).total == [1.0]
    time.sleep(0.1)
    assert made.score(["fine"], ROWS[:1]).total == [1.0]


def test_scoring_from_several_threads(runner):
    made, found = runner("length"), {}

    def work(n):
        found[n] = [made.score(["x" * n], ROWS[:1]).total for _ in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [[float(n)]] * 20 for n in range(4)}


def test_functions_get_rows_of_their_own(runner):
    rows = [dict(row) for row in ROWS]
    assert runner("changes_its_rows", "same").score(["a", "b", "c"], rows).by_name["same"] == [1.0, 1.0, 1.0]
    assert rows == ROWS


def test_the_worker_does_not_import_torch(runner):
    rewards = {
        "torch": WeightedReward(f"{HERE}.imports_torch"),
        "digit": WeightedReward("recipes.environments.largest_digit.correct"),
    }
    made = RewardRunner(rewards, timeout_s=5, allow_targets=[HERE])
    assert made.score(["a"], ROWS[:1]).by_name["torch"] == [0.0]
    made.close()


def test_one_process_serves_all_calls_and_close_ends_it(runner):
    made = runner("process_id")
    (first,), (second,) = (made.score(["x"], ROWS[:1]).total for _ in range(2))
    assert first == second != os.getpid()
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)
    made.close()


def test_interrupting_a_call_does_not_mix_up_answers(runner):
    made = runner("slow")
    made.score(["x"], ROWS[:1])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        made.score(["slow"], ROWS[:1])
    assert made.score(["x"], ROWS[:1]).total == [1.0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_run_and_ctrl_c_shows_one_traceback(tmp_path, signum):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from recipes.environments.rewards import RewardRunner\n"
        "from recipes.environments.environment import WeightedReward\n"
        f"rewards = dict(pid=WeightedReward('{HERE}.process_id'), hangs=WeightedReward('{HERE}.hangs'))\n"
        f"runner = RewardRunner(rewards, timeout_s=60, allow_targets=['{HERE}'])\n"
        "print(int(runner._results('pid', ['x'], [{}])[0]), flush=True)\n"
        "runner.score(['hang'], [{}])\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, process_group=0
    )
    worker = int(run.stdout.readline())
    time.sleep(0.2)
    os.killpg(run.pid, signum)  # as a terminal does
    _, err = run.communicate(timeout=10)
    assert err.count("Traceback") == (signum == signal.SIGINT)
    for _ in range(60):
        if not Path(f"/proc/{worker}").exists() or Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker was still there")


def local_reward(completions, rows):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "allowed", "text"),
    [
        (
            f"{HERE}.nothing",
            [HERE],
            f"environment.rewards.r.function={HERE}.nothing cannot be imported: AttributeError",
        ),
        (f"{HERE}.length", [], "a target must lie in one of the modules"),
        (f"{HERE}.SLOW", [HERE], "is a str: accepted are classes and functions"),
        (f"{HERE}.only_completions", [HERE], "a reward is called as function(completions, rows): too many positional"),
        (lambda completions, rows: [0.0], [], "put it at the top of a module"),
    ],
)
def test_functions_are_found_before_anything_starts(function, allowed, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        RewardRunner({"r": WeightedReward(function)}, timeout_s=1, allow_targets=allowed)


def test_rows_hold_plain_values(runner):
    with pytest.raises(ConfigError, match="row cannot be sent to its rewards, it must hold plain values"):
        runner("length").score(["x"], [{"answer": threading.Lock()}])


def test_every_completion_has_a_row(runner):
    with pytest.raises(ValueError, match="2 completions and 1 rows"):
        runner("length").score(["x", "y"], ROWS[:1])
    assert runner("length").score([], []).total == []


def test_a_module_that_fails_in_the_worker_only(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def score(completions, rows):\n    return [0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = RewardRunner({"r": WeightedReward("only_here.score")}, timeout_s=1, allow_targets=["only_here"])
    (tmp_path / "only_here.py").write_text("raise OSError('no licence')\n")
    with pytest.raises(ConfigError, match="cannot be imported where rewards are computed: OSError: no licence"):
        made.score(["x"], [{}])


def test_a_function_that_shortens_its_completions_is_found_out(runner):
    with pytest.raises(
        RewardShapeError, match=r"takes_one_away was called with 3 completions: expected 3 rewards, got 2"
    ):
        runner("takes_one_away").score(["a", "b", "c"], ROWS)


def test_a_function_that_fails_whatever_it_is_given_is_found_by_a_trial(runner):
    with pytest.raises(RewardShapeError, match="adds_numbers_to_texts fails on every completion of a trial"):
        runner("adds_numbers_to_texts").check(ROWS)


def test_nobody_waits_for_more_than_a_few_timeouts_of_a_batch(runner):
    started = time.monotonic()
    scores = runner("hangs_always", timeout_s=0.3).score(["x"] * 40, [ROWS[0]] * 40)
    assert scores.total == [None] * 40
    assert scores.errors == 40
    assert time.monotonic() - started < 15
