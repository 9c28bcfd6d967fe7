"""Policy-gradient training on two ranks: the same completions and the same run as on one, and the same when resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.conftest import GRPO_SMALL, reward
from tests.recipes.test_grpo import rollouts_of, rows_of

pytestmark = pytest.mark.multiproc


def on_two_ranks(prompts_path: Path, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "recipes.grpo",
    ]
    fixed = [f"environment.path={prompts_path}", reward("parity"), f"hydra.run.dir={run_dir}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
    return subprocess.run(
        [*command, *GRPO_SMALL, *fixed, *overrides], env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_two_ranks_sample_and_train_as_one_and_resume_on_one(grpo, prompts_path, tmp_path):
    options = [
        *("loss=grpo", "loss.kl.coef=0.1", "rollout.recompute_logprobs=true", "train.global_batch_size=6"),
        *("rollout.zero_variance=refill", "rollout.max_refills=20", "checkpoint.every_steps=3", "train.max_steps=4"),
    ]
    assert grpo(tmp_path / "one", *options) == 0
    two = on_two_ranks(prompts_path, tmp_path / "two", *options)
    assert two.returncode == 0, two.stderr
    alone, together = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (one["step"], key)
    for step in (1, 3):
        for one, other in zip(rollouts_of(tmp_path / "one", step), rollouts_of(tmp_path / "two", step), strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)
            assert one["advantage"] == other["advantage"]
    middle = tmp_path / "two/checkpoints/step-00000003"
    assert grpo(tmp_path / "elsewhere", *options, f"checkpoint.resume={middle}") == 0
    for one, other in zip(alone, rows_of(tmp_path / "elsewhere"), strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert one["train/weight_total"] == other["train/weight_total"]


def test_two_threads_of_two_ranks_talk_past_each_other(prompts_path, tmp_path):
    """One samples ahead, the other exchanges log-probabilities of the reference."""
    options = ["loss.kl.coef=0.1", "rollout.max_staleness=1", "train.max_steps=25", "rollout.recompute_logprobs=true"]
    two = on_two_ranks(prompts_path, tmp_path / "two", *options)
    assert two.returncode == 0, two.stderr
    assert [row["rollout/staleness"] for row in rows_of(tmp_path / "two")] == [0, *[1] * 24]
