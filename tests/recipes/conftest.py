"""A small run of the recipe, in this process or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    *(
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.num_kv_heads=1",
    ),
    *("data=files", "train.global_batch_size=4", "train.max_steps=6", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("eval.every_steps=0", "checkpoint.every_steps=0"),
]


@pytest.fixture(scope="session")
def rows_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 chat rows of several lengths, with answers."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for n in range(21):
            question, answer = f"Count {n}: " + "a" * (n % 5), str(n * 37)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, "answer": answer}) + "\n")
    return path


@pytest.fixture
def sft(rows_path: Path) -> Callable[..., int]:
    """A call runs `recipes.sft` in this process with a run folder and overrides, and returns the exit code."""
    from recipes.runtime.entry import run
    from recipes.sft import train

    def call(run_dir: Path, *overrides: str, small: bool = True) -> int:
        shape = SMALL if small else [option for option in SMALL if not option.startswith("model.")]
        return run("sft", train, [*shape, f"data.path={rows_path}", f"hydra.run.dir={run_dir}", *overrides])

    return call


@pytest.fixture
def sft_process(rows_path: Path) -> Callable[..., subprocess.Popen]:
    """Start `python -m recipes.sft` as a process of its own."""

    def start(run_dir: Path, *overrides: str, **options: Any) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipes.sft", *SMALL, f"data.path={rows_path}", f"hydra.run.dir={run_dir}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | options.pop("env", {})
        return subprocess.Popen(
            [*command, *overrides], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )

    return start


GRPO_SMALL = [
    *(option for option in SMALL if option.startswith("model.")),
    *("model=tiny", "environment=rows", "allow_targets=[grpo_rewards]", "scheduler.warmup_steps=0"),
    *("rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_new_tokens=5", "rollout.show=0"),
    *("train.max_steps=4", "eval.every_steps=0", "checkpoint.every_steps=0", "optim.lr=1e-3"),
    "environment.unfinished=score",
]


def reward(name: str, weight: float = 1.0) -> str:
    """The override that rewards by a function of tests/recipes/grpo_rewards.py."""
    return f"environment.rewards={{{name}: {{function: grpo_rewards.{name}, weight: {weight}}}}}"


@pytest.fixture(scope="session")
def prompts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 prompts of several lengths."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}" + " please" * (n % 3)}) + "\n" for n in range(7)))
    return path


@pytest.fixture
def grpo(prompts_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A call runs `recipes.grpo` in this process on a random tiny model, and returns the exit code."""
    from recipes.grpo import train
    from recipes.runtime.entry import run

    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def call(run_dir: Path, *overrides: str, rewards: str = "parity", small: bool = True) -> int:
        shape = GRPO_SMALL if small else [option for option in GRPO_SMALL if not option.startswith("model")]
        fixed = [f"environment.path={prompts_path}", reward(rewards), f"hydra.run.dir={run_dir}"]
        return run("grpo", train, [*shape, *fixed, *overrides])

    return call
