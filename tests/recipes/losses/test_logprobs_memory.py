"""Resident memory of scoring, each job in a process of its own, as `scripts/bench_logprobs.py` measures it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status"),
]

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_logprobs.py"


def growth_mib(job, **options):
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(SCRIPT), "--measure", "memory", "--threads", "1", "--jobs", job, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(run.stdout)["growth_mib"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_by_a_third_of_that_of_full_logits_at_most(dtype):
    size = {"rows": 4096, "vocab": 49152, "hidden": 576, "dtype": dtype}
    for plain, chunked in (("plain_ce", "linear"), ("plain_scores", "recomputed")):
        assert growth_mib(chunked, **size) <= growth_mib(plain, **size) / 3


@pytest.mark.parametrize("job", ["linear", "recomputed"])
def test_a_large_vocabulary_takes_a_few_chunk_buffers_at_most(job):
    # full float32 logits would be 2 GiB, a chunk's are 256 MiB
    assert growth_mib(job, rows=4096, vocab=131072, hidden=64, chunk_size=512) <= 4 * 256
