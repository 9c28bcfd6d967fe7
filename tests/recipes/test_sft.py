"""The recipe end to end: run folder, resume, interruption, bad input. Small models; the loop is the real one."""

import json
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.training.checkpoint import complete_checkpoints

Sft = Callable[..., int]
UNSTABLE = ("time/", "perf/", "mem/")
EVALUATED = ("data.eval_fraction=0.2", "eval.every_steps=2", "eval.max_new_tokens=4")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(UNSTABLE)} for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "final" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    for name in ("objective.json", "data_ledger.json"):
        assert (one / name).read_text() == (other / name).read_text()


def test_a_run_leaves_the_run_folder_of_the_design(sft: Sft, tmp_path: Path) -> None:
    assert sft(tmp_path, *EVALUATED, "checkpoint.every_steps=3", "checkpoint.keep=9") == 0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for row in rows[1:]:
        assert {
            "train/loss",
            "train/grad_norm",
            "train/lr",
            "train/tokens",
            "train/weight_total",
            "train/skipped",
        } <= row.keys()
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6]
    assert all("eval/accuracy" in row and "eval/token_accuracy" in row for row in rows if "eval/loss" in row)
    assert {path.name for path in complete_checkpoints(tmp_path)} >= {"step-00000003", "step-00000006"}
    assert json.loads((tmp_path / "objective.json").read_text()) == {
        "name": "eval/loss",
        "value": rows[-1]["eval/loss"],
    }
    ledger = json.loads((tmp_path / "data_ledger.json").read_text())
    assert ledger["rows_in"] == ledger["rows_kept"] == 17
    assert ledger["heldout"]["rows_in"] == 4
    assert {".hydra", "run.log", "metrics.jsonl", "data_ledger.json", "objective.json", "checkpoints", "final"} == {
        path.name for path in tmp_path.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "final")) <= model.config.vocab_size


@pytest.mark.parametrize("layout", ["collate=padded", "collate=packed"])
def test_layout_split_and_order_of_microbatches_change_nothing(sft: Sft, tmp_path: Path, layout: str) -> None:
    assert sft(tmp_path / "whole") == 0
    options = [
        layout,
        *(
            {
                "collate=padded": ["train.microbatch_size=1"],
                "collate=packed": ["collate.max_tokens=48", "data.max_length=48"],
            }[layout]
        ),
    ]
    assert sft(tmp_path / "split", *options) == 0
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "split"), strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=2e-5)
        assert one["train/tokens"] == other["train/tokens"]
    assert metrics(tmp_path / "whole")[0]["train/loss"] == pytest.approx(
        metrics(tmp_path / "split")[0]["train/loss"], abs=1e-6
    )


@pytest.mark.parametrize("options", [(), ("model.dropout=0.1", "collate=packed", "data.max_length=64")])
def test_resume_from_the_middle_of_an_epoch_is_exact(sft: Sft, tmp_path: Path, options: tuple[str, ...]) -> None:
    common = (*options, "train.max_steps=null", "train.epochs=2", "checkpoint.keep=9", *EVALUATED)
    assert sft(tmp_path / "through", *common, "checkpoint.every_steps=0") == 0
    assert sft(tmp_path / "resumed", *common, "checkpoint.every_steps=3") == 0
    assert_same_run(tmp_path / "through", tmp_path / "resumed")
    first = tmp_path / "resumed/checkpoints/step-00000003"
    assert sft(tmp_path / "resumed", *common, "checkpoint.every_steps=3", f"checkpoint.resume={first}") == 0
    assert_same_run(tmp_path / "through", tmp_path / "resumed")
    assert sft(tmp_path / "elsewhere", *common, f"checkpoint.resume={first}") == 0
    assert_same_run(tmp_path / "through", tmp_path / "elsewhere")
    assert (tmp_path / "resumed/.hydra/config.yaml").exists()
    assert (tmp_path / "resumed/.hydra/resume-1/config.yaml").exists()


def test_a_finished_run_says_so(sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sft(tmp_path) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl")}
    capfd.readouterr()
    assert sft(tmp_path, "checkpoint.resume=auto") == 0
    assert "finished already" in capfd.readouterr().out
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


def test_a_longer_run_goes_on_from_a_finished_one(sft: Sft, tmp_path: Path) -> None:
    assert sft(tmp_path / "long", "train.max_steps=8") == 0
    assert sft(tmp_path / "grown", "checkpoint.every_steps=6") == 0
    assert sft(tmp_path / "grown", "checkpoint.every_steps=6", "checkpoint.resume=auto", "train.max_steps=8") == 0
    assert_same_run(tmp_path / "long", tmp_path / "grown")


def test_auto_passes_over_a_damaged_checkpoint(sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sft(tmp_path / "through") == 0
    assert sft(tmp_path / "run", "checkpoint.every_steps=2", "checkpoint.keep=9") == 0
    (tmp_path / "run/checkpoints/step-00000006/COMPLETE").write_text("")
    with (tmp_path / "run/checkpoints/step-00000004/state/__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "run/objective.json").unlink()
    capfd.readouterr()
    assert sft(tmp_path / "run", "checkpoint.every_steps=2", "checkpoint.resume=auto", "checkpoint.keep=9") == 0
    said = capfd.readouterr().out
    assert said.count("is damaged") == 2
    assert "step-00000002, after step 2: 4 steps left" in said
    assert_same_run(tmp_path / "through", tmp_path / "run")


def test_other_frozen_weights_are_refused_on_resume(
    sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sft(tmp_path / "base", "train.max_steps=1") == 0
    base = tmp_path / "base/final"
    lora = ["model=hf", f"model.name={base}", "model.lora.rank=2"]
    assert sft(tmp_path / "run", *lora, "checkpoint.every_steps=3", small=False) == 0
    tensors = {name: value * 1.1 for name, value in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    resume = ["checkpoint.resume=auto", "train.max_steps=8", "checkpoint.every_steps=3"]
    capfd.readouterr()
    assert sft(tmp_path / "run", *lora, *resume, small=False) == 2
    assert "other frozen weights" in capfd.readouterr().err


def test_a_run_goes_on_from_an_adapter_export(sft: Sft, tmp_path: Path) -> None:
    assert sft(tmp_path / "base", "train.max_steps=1") == 0
    lora = ["model=hf", f"model.name={tmp_path / 'base/final'}", "model.lora.rank=2", "model.lora.export=adapter"]
    assert sft(tmp_path / "adapter", *lora, small=False) == 0
    assert (tmp_path / "adapter/final/adapter_config.json").exists()
    assert sft(tmp_path / "on", "model=hf", f"model.name={tmp_path / 'adapter/final'}", small=False) == 0
    assert metrics(tmp_path / "on")[0]["train/loss"] < metrics(tmp_path / "adapter")[0]["train/loss"]


def test_a_failed_export_keeps_the_training(
    sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("recipes.training.run.export_model", full)
        assert sft(tmp_path) == 1
    assert "No space left on device; a checkpoint is kept" in capfd.readouterr().err
    assert not (tmp_path / ".tmp-final").exists()
    assert sft(tmp_path, "checkpoint.resume=auto") == 0
    assert (tmp_path / "final/model.safetensors").exists()


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_never_interrupted(
    sft: Sft, sft_process: Any, tmp_path: Path
) -> None:
    options = (
        "train.max_steps=60",
        "checkpoint.every_steps=5",
        "model.dropout=0.1",
        "data.eval_fraction=0.2",
        "eval.every_steps=10",
    )
    torch.set_num_threads(1)
    through = sft_process(tmp_path / "through", *options)
    assert through.wait() == 0, through.stderr.read()
    kills = 0
    for attempt in range(12):
        process = sft_process(tmp_path / "killed", *options, "checkpoint.resume=auto")
        path, grown = tmp_path / "killed/metrics.jsonl", 7 + 5 * attempt
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.read_text().count("\n") >= grown:
                time.sleep(0.013 * attempt)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        if process.wait() == 0:
            break
    process = sft_process(tmp_path / "killed", *options, "checkpoint.resume=auto")
    assert process.wait() == 0, process.stderr.read()
    assert kills >= 3
    assert_same_run(tmp_path / "through", tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_its_own_exit_code(
    sft: Sft, sft_process: Any, tmp_path: Path, number: int
) -> None:
    process = sft_process(tmp_path, "train.max_steps=100000")
    path = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") > 2):
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 128 + number, process.stderr.read()
    (checkpoint,) = complete_checkpoints(tmp_path)
    assert checkpoint.name == f"step-{metrics(tmp_path)[-1]['step']:08d}"
    assert not (tmp_path / "final").exists()


def test_disk_full_while_saving_keeps_the_last_good_checkpoint(sft_process: Any, tmp_path: Path) -> None:
    def small_files() -> None:  # after the first checkpoint, which is larger, nothing can be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    assert sft_process(tmp_path, "checkpoint.every_steps=6").wait() == 0
    good = complete_checkpoints(tmp_path)
    process = sft_process(
        tmp_path, "checkpoint.every_steps=2", "train.max_steps=10", "checkpoint.resume=auto", preexec_fn=small_files
    )
    _, errors = process.communicate()
    assert process.returncode == 1, errors
    assert re.fullmatch(
        r"could not write .*step-00000008: .*; the earlier checkpoints are untouched", errors.strip()
    ), errors
    assert complete_checkpoints(tmp_path) == good
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good[0].name]


def test_a_used_folder_is_refused_and_left_as_it_was(
    sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sft(tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert sft(tmp_path) == 2
    assert "checkpoint.resume=auto" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_resume_with_another_option_names_key_and_both_values(
    sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sft(tmp_path, "checkpoint.every_steps=3", "optim.lr=0.001") == 0
    assert (
        sft(tmp_path, "checkpoint.every_steps=3", "optim.lr=0.002", "train.max_steps=9", "checkpoint.resume=auto") == 2
    )
    assert "optim.lr=0.002 differs from the checkpoint's optim.lr=0.001" in capfd.readouterr().err


def test_non_finite_stops_and_publishes_nothing(
    sft: Sft, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_after(monkeypatch, step=4)
    assert sft(tmp_path, "checkpoint.every_steps=2") == 1
    error = capfd.readouterr().err
    assert re.search(r"step 5: loss nan, gradient norm nan: not finite.*Datums \[\d+, \d+, \d+, \d+\]", error)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "final").exists()


def test_non_finite_steps_can_be_skipped_and_are_counted(
    sft: Sft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_after(monkeypatch, step=4)
    assert sft(tmp_path, "train.non_finite=skip") == 0
    rows = metrics(tmp_path)
    assert [row["train/skipped"] for row in rows] == [0, 0, 0, 0, 1, 2]
    assert rows[4]["train/loss"] is None
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def poison_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From the given number of steps on, the loss is NaN."""
    from recipes.losses.cross_entropy import CrossEntropy
    from recipes.training import step as module

    real, calls = module.microbatch_loss, []

    def poisoned(model: torch.nn.Module, batch: Any, loss: CrossEntropy, observe: Any) -> torch.Tensor:
        calls.append(1)
        return real(model, batch, loss, observe) * (float("nan") if len(calls) > step else 1.0)

    monkeypatch.setattr(module, "microbatch_loss", poisoned)


def test_best_checkpoint_by_a_named_metric_survives_pruning(sft: Sft, tmp_path: Path) -> None:
    options = (
        "train.max_steps=8",
        *EVALUATED,
        "eval.every_steps=1",
        "checkpoint.every_steps=1",
        "checkpoint.keep=1",
        "optim.lr=0.003",
    )
    assert sft(tmp_path, *options, "objective.direction=max", "objective.which=best") == 0
    evaluated = {row["step"]: row["eval/loss"] for row in metrics(tmp_path) if row["step"] > 0}
    best = max(evaluated, key=evaluated.__getitem__)
    assert {path.name for path in complete_checkpoints(tmp_path)} == {f"step-{step:08d}" for step in {best, 8}}
    assert best != 8
    assert json.loads((tmp_path / "objective.json").read_text())["value"] == max(
        row["eval/loss"] for row in metrics(tmp_path) if "eval/loss" in row
    )


def test_all_steps_without_weight_leave_the_model_alone(sft: Sft, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"tokens": [5, 6, 7, 8], "weights": [0, 1, 0, 1]}] * 4 + [{"tokens": [5, 6], "weights": [1, 0]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft(tmp_path / "run", f"data.path={path}", "train.max_steps=2") == 0
    ledger = json.loads((tmp_path / "run/data_ledger.json").read_text())
    assert ledger["rows_dropped"] == {"no_target": 1}


def test_evaluation_is_the_same_for_any_batch_size(sft: Sft, tmp_path: Path) -> None:
    losses = []
    for size in (1, 3, 32):
        options = ("data.eval_fraction=0.4", "eval.every_steps=6", f"eval.batch_size={size}", "eval.max_new_tokens=4")
        assert sft(tmp_path / str(size), *options) == 0
        losses.append([row["eval/loss"] for row in metrics(tmp_path / str(size)) if "eval/loss" in row])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] == pytest.approx(losses[2], abs=1e-6)


def test_weights_of_rows_reach_the_loss(sft: Sft, tmp_path: Path) -> None:
    runs = {}
    for name, weight in {"whole": [0, 1, 1, 1], "half": [0, 0.5, 0.5, 0.5], "one": [0, 0.5, 1, 1]}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"tokens": [5, 6, 7, 8], "weights": weight}) + "\n")
        assert sft(tmp_path / name, f"data.path={path}", "train.max_steps=1", "train.global_batch_size=1") == 0
        runs[name] = metrics(tmp_path / name)[0]
    assert runs["whole"]["train/loss"] == pytest.approx(runs["half"]["train/loss"], abs=1e-6)
    assert runs["half"]["train/weight_total"] == pytest.approx(runs["whole"]["train/weight_total"] / 2)
    assert runs["one"]["train/weight_total"] == 2.5
    assert abs(runs["one"]["train/loss"] - runs["whole"]["train/loss"]) > 1e-5
