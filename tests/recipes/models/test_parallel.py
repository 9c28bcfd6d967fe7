"""Under DistributedDataParallel two ranks have the gradient of one, a rank without weight included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.models.scoring_worker import SHARES, gradients

FAMILIES = ("llama", "gpt2", "qwen3_moe")


@pytest.mark.multiproc
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("scoring_worker.py")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(worker.parents[3])}
    command = [sys.executable, str(worker)]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path), *FAMILIES], env=env) for rank in (0, 1)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for family in FAMILIES:
        first, second = (torch.load(tmp_path / f"{family}-{rank}.pt", weights_only=True) for rank in (0, 1))
        expected = gradients(family, [m for share in SHARES for m in share], 1, packed=True)
        everything = torch.cat([g.flatten() for g in expected.values()]).norm()
        for name, gradient in expected.items():
            assert torch.equal(first[name], second[name]), name
            assert (first[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * everything), name
