"""The recipe on two ranks: the same run as on one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.conftest import SMALL
from tests.recipes.test_sft import EVALUATED, metrics

pytestmark = pytest.mark.multiproc


def on_two_ranks(rows_path: Path, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "recipes.sft"]
    options = [*SMALL, f"data.path={rows_path}", f"hydra.run.dir={run_dir}", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=240, check=False)


def test_two_ranks_are_one_run_and_resume_on_one(sft: Callable[..., int], rows_path: Path, tmp_path: Path) -> None:
    options = (*EVALUATED, "collate=packed", "data.max_length=64", "checkpoint.every_steps=3", "checkpoint.keep=9")
    assert sft(tmp_path / "one", *options) == 0
    two = on_two_ranks(rows_path, tmp_path / "two", *options)
    assert two.returncode == 0, two.stderr
    alone, together = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if key != "data/utilisation":  # a short rank's fillers are padding
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (one["step"], key)
    middle = tmp_path / "two/checkpoints/step-00000003"
    assert sft(tmp_path / "elsewhere", *options, f"checkpoint.resume={middle}") == 0
    for one, other in zip(alone, metrics(tmp_path / "elsewhere"), strict=True):
        assert one.get("train/loss") == pytest.approx(other.get("train/loss"), abs=1e-5)
        assert one.get("train/tokens") == other.get("train/tokens")


def test_a_wrong_number_of_ranks_is_refused(rows_path: Path, tmp_path: Path) -> None:
    refused = on_two_ranks(rows_path, tmp_path / "run", "launch.num_processes=3")
    assert refused.returncode != 0
    assert refused.stderr.count("launch.num_processes=3, but the launcher started 2") == 1
