"""A sweep checks every job first, then runs each in a process of its own."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from recipes.runtime import sweep
from recipes.runtime.entry import run


@pytest.fixture
def jobs(monkeypatch):
    """Commands of the jobs that were started; a job of optim.lr=3 fails."""
    commands = []

    def run_job(command):
        commands.append(command)
        run_dir = next(o for o in command if o.startswith("hydra.run.dir=")).partition("=")[2].strip("'")
        Path(run_dir, "objective.json").write_text(json.dumps({"name": "train/loss", "value": len(commands)}))
        return 7 if "optim.lr=3" in command else 0

    monkeypatch.setattr(sweep, "_run", run_job)
    return commands


def never(config, run_dir):
    raise AssertionError("trained in the sweep's own process")


def test_each_job_is_the_command_of_a_single_run(jobs):
    argv = ["-m", "optim.lr=1", "train.seed=range(2)", "hydra.sweep.dir=swept", "hydra.verbose=true", "extras.a=x"]
    assert run("sft", never, argv) == 0
    assert [job[:3] for job in jobs] == [[sys.executable, "-m", "recipes.sft"]] * 2
    assert [job[3:] for job in jobs] == [
        [
            f"optim.lr={lr}",
            f"train.seed={seed}",
            "extras.a=x",
            "hydra.verbose=true",
            f"hydra.run.dir='{Path.cwd()}/swept/{number}'",
            "hydra.mode=RUN",
        ]
        for number, (lr, seed) in enumerate([(1, 0), (1, 1)])
    ]
    assert not list(Path("swept").rglob(".hydra"))  # each job saves its own


def test_groups_are_swept_and_files_of_ones_own_are_passed_on(jobs, tmp_path):
    (tmp_path / "mine" / "optim").mkdir(parents=True)
    (tmp_path / "mine" / "optim" / "slow.yaml").write_text("lr: 0.1\n")
    assert run("sft", never, ["--config-dir", "mine", "-m", "optim=slow", "collate=padded,packed"]) == 0
    assert [job[3:7] for job in jobs] == [
        ["--config-dir", "mine", "optim=slow", f"collate={collate}"] for collate in ("padded", "packed")
    ]


def test_an_experiment_is_swept_against_none(jobs):
    assert run("sft", never, ["-m", "experiment=null,sft_tiny_packed"]) == 0
    assert [job[3] for job in jobs] == ["experiment=null", "experiment=sft_tiny_packed"]


def test_a_failed_job_does_not_stop_the_rest(jobs, capfd):
    assert run("sft", never, ["-m", "optim.lr=3,2"]) == 1
    assert len(jobs) == 2
    assert "sweep: job 0 ended with exit code 7; its log is" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["optim.lr=1,abc"], "optim.lr=abc: accepted are finite numbers above 0 (job optim.lr=abc)"),
        (["optim.lr=1,-2"], "optim.lr=-2.0: accepted are finite numbers above 0 (job optim.lr=-2)"),
        (["loss=cross_entropy,pppo"], "loss has no option pppo"),
        (["optim.lrr=1,2"], "unknown key optim.lrr, did you mean optim.lr?"),
        (["+optim.lr=1,2"], "keys are never added"),
        (["collate=padded,packed", "attention=per_document,xdoc"], "(job collate=padded attention=xdoc)"),
        (["train.epochs=1,2"], "(job train.epochs=2)"),
        (["optim.lr=interval(1,2)"], "does not support sweep type"),
    ],
)
def test_a_bad_value_is_refused_before_any_job(argv, said, jobs, capfd):
    assert run("sft", never, ["-m", *argv]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert len(err.splitlines()) <= 3
    assert (jobs, list(Path.cwd().iterdir())) == ([], [])


def test_a_sweep_under_a_launcher_is_refused(jobs, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("sft", never, ["-m", "optim.lr=1,2"]) == 2
    assert "a sweep cannot run under torchrun" in capfd.readouterr().err
    assert jobs == []


def test_a_missing_objective_is_said_and_not_a_number(tmp_path, caplog):
    assert sweep._objective(tmp_path) != sweep._objective(tmp_path)
    assert "has no objective" in caplog.text
    (tmp_path / "objective.json").write_text('{"name": "x", "value": 0.5}')
    assert sweep._objective(tmp_path) == 0.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_job_may_finish_its_checkpoint(number, tmp_path):
    child = (
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(0.2); open('checkpoint', 'w'); sys.exit(3)\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        "open('ready', 'w'); time.sleep(30)"
    )

    def send():
        while not Path("ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SystemExit) as stopped:
        sweep._run([sys.executable, "-c", child])
    sender.join()
    assert stopped.value.code == 128 + number
    assert Path("checkpoint").exists()
