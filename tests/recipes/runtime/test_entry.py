"""Exit codes, and what a run leaves on the screen, in its log and in its folder."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.closed import ConfigError
from conf.schema import SFTConfig
from datum.errors import DataError
from recipes.models.errors import ModelError
from recipes.runtime.entry import run
from recipes.runtime.outcome import StopRun, note_first_step

ROOT = Path(__file__).resolve().parents[3]
RUN = "hydra.run.dir=run"


def raising(error, *, after_step=False):
    def train(config, run_dir):
        if after_step:
            note_first_step()
            (run_dir / "metrics.jsonl").write_text("{}\n")
        raise error

    return train


def test_a_run_gets_its_typed_configuration_and_its_folder(capfd):
    seen = []

    def train(config, run_dir):
        logging.getLogger("recipes.sft").info("hello")
        seen.append((config, run_dir))

    assert run("sft", train, ["optim.lr=1e-4", "extras.a.b=1"]) == 0
    (config, run_dir) = seen[0]
    assert isinstance(config, SFTConfig)
    assert (config.optim.lr, config.extras) == (1e-4, {"a": {"b": 1}})
    assert run_dir.parent == Path.cwd() / "outputs" / "sft"
    assert sorted(path.name for path in (run_dir / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert (run_dir / ".hydra" / "overrides.yaml").read_text() == "- optim.lr=1e-4\n- extras.a.b=1\n"
    assert "b: 1" in (run_dir / ".hydra" / "config.yaml").read_text()
    assert capfd.readouterr().out == "hello\n"
    assert "INFO recipes.sft: hello" in (run_dir / "run.log").read_text()


def test_runs_at_the_same_moment_have_their_own_folders():
    seen = set()
    for _ in range(3):
        assert run("sft", lambda config, run_dir: seen.add(run_dir), []) == 0
    assert len(seen) == 3


def test_run_id_names_the_folder(monkeypatch):
    monkeypatch.setenv("RUN_ID", "first")
    seen = []
    assert run("sft", lambda config, run_dir: seen.append(run_dir), []) == 0
    assert seen == [Path.cwd() / "outputs" / "sft" / "first"]


def test_ranks_share_a_folder_and_overwrite_nothing(monkeypatch):
    monkeypatch.setenv("RUN_ID", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert run("sft", lambda config, run_dir: None, []) == 0
    names = sorted(str(path.relative_to("outputs/sft/first")) for path in Path("outputs/sft/first").rglob("*.*"))
    assert names == [
        ".hydra",
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "run-rank1.log",
        "run.log",
    ]


def test_ranks_without_a_shared_folder_are_refused(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("sft", raising(AssertionError), []) == 2
    assert "2 ranks need one run folder" in capfd.readouterr().err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("error", "kind"), [(ConfigError, "config error"), (DataError, "data error"), (ModelError, "model error")]
)
def test_a_typed_error_is_2_before_the_first_step_and_1_after_it(error, kind, capfd):
    message = error("rows.jsonl:3: what was got\nwhat is accepted\n\nhow to fix\nmore")
    assert run("sft", raising(message), [RUN]) == 2
    assert capfd.readouterr().err == f"{kind}: rows.jsonl:3: what was got\nwhat is accepted\nhow to fix\n"
    assert list(Path.cwd().iterdir()) == []

    assert run("sft", raising(message, after_step=True), [RUN]) == 1
    assert capfd.readouterr().err == f"{kind}: rows.jsonl:3: what was got\nwhat is accepted\nhow to fix\n"
    assert "Traceback" in Path("run/run.log").read_text()


def test_any_other_error_is_1_with_a_traceback_on_the_screen_and_in_the_log(capfd):
    for after_step in (False, True):
        argv = [RUN, "checkpoint.resume=auto"]
        assert run("sft", raising(RuntimeError("boom"), after_step=after_step), argv) == 1
        err = capfd.readouterr().err
        assert err.startswith("Traceback")
        assert err.endswith("RuntimeError: boom\n")
    assert Path("run/run.log").read_text().count("RuntimeError: boom") == 2


def test_stop_run_ends_with_its_code_and_one_message(capfd):
    assert run("sft", raising(StopRun(143, "interrupted after step 5"), after_step=True), [RUN]) == 143
    assert capfd.readouterr().err == "interrupted after step 5\n"
    assert "interrupted after step 5" in Path("run/run.log").read_text()


def test_keyboard_interrupt_is_130(capfd):
    assert run("sft", raising(KeyboardInterrupt()), [RUN]) == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_a_used_folder_is_refused_untouched(capfd):
    def train(config, run_dir):
        (run_dir / "metrics.jsonl").write_text("{}\n")

    assert run("sft", train, [RUN]) == 0
    before = {path: path.is_file() and path.read_bytes() for path in Path("run").rglob("*")}
    assert run("sft", raising(AssertionError), [RUN, "optim.lr=1"]) == 2
    assert "holds a run already" in capfd.readouterr().err
    # The same where the checkpoint's options are compared later, in the recipe.
    refusing = raising(ConfigError("optim.lr=1 differs from the checkpoint's"))
    assert run("sft", refusing, [RUN, "optim.lr=1", "checkpoint.resume=auto"]) == 2
    assert {path: path.is_file() and path.read_bytes() for path in Path("run").rglob("*")} == before
    assert run("sft", train, [RUN, "checkpoint.resume=auto"]) == 0
    assert Path("run/.hydra/resume-1/config.yaml").exists()
    assert {path: path.is_file() and path.read_bytes() for path in before if "run.log" not in path.name} == {
        path: content for path, content in before.items() if "run.log" not in path.name
    }


def test_a_refusal_is_said_once_a_machine(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, local_rank, speaks in (("0", "0", True), ("1", "1", False), ("2", "0", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert run("sft", raising(DataError("no rows")), [RUN]) == 2
        assert capfd.readouterr().err == ("data error: no rows\n" if speaks else "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_loop_ends_with_its_code(number, code):
    program = (
        "import time\nfrom recipes.runtime.entry import recipe\n"
        "def train(config, run_dir):\n    print('ready', flush=True)\n    time.sleep(30)\n"
        "recipe('sft', train)()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(timeout=20) == code
