"""Time and memory of chunked target log-probabilities against full logits, forward and backward.

    python scripts/bench_logprobs.py                                  # time, interleaved in this process
    python scripts/bench_logprobs.py --measure memory                 # growth of resident memory, a process each
    python scripts/bench_logprobs.py --dtype bfloat16 --rows 4096 --vocab 128000 --frozen-head

Four jobs, each giving the gradient of hidden states and (unless --frozen-head) of the head:

    plain_ce       full logits, sum of coefficient * log-probability through torch's cross-entropy
    linear         score_targets with coefficients: the gradient is formed in the forward pass
    plain_scores   full logits, log-probabilities and entropy through log_softmax
    recomputed     score_targets without coefficients, with entropy: logits are formed again in backward
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from recipes.losses.logprobs import score_targets

Job = Callable[[], None]


def plain_ce(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, chunk_size: int) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * -coefficients).sum()


def linear(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, chunk_size: int) -> Tensor:
    scores = score_targets(hidden, weight, targets, coefficients=coefficients, chunk_size=chunk_size)
    assert scores.weighted_sum is not None
    return scores.weighted_sum


def plain_scores(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, chunk_size: int) -> Tensor:
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float(), -1)
    with torch.no_grad():
        _ = -(log_p.exp() * log_p).sum(-1)  # the entropy is logged, not trained
    return (log_p.gather(1, targets[:, None]).squeeze(1).exp() * coefficients).sum()


def recomputed(hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, chunk_size: int) -> Tensor:
    scores = score_targets(hidden, weight, targets, entropy=True, chunk_size=chunk_size)
    return (scores.logprobs.exp() * coefficients).sum()


JOBS = {"plain_ce": plain_ce, "linear": linear, "plain_scores": plain_scores, "recomputed": recomputed}


def prepare(name: str, args: argparse.Namespace) -> Job:
    """Return the job as a call without arguments; the inputs exist when this returns."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.rows, args.hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, generator=generator) * 0.05).to(dtype)
    weight.requires_grad_(not args.frozen_head)
    targets = torch.randint(0, args.vocab, (args.rows,), generator=generator)
    coefficients = torch.randn(args.rows, generator=generator)

    def job() -> None:
        hidden.grad = weight.grad = None
        JOBS[name](hidden, weight, targets, coefficients, args.chunk_size).backward()

    return job


def time_jobs(args: argparse.Namespace) -> list[dict[str, object]]:
    """Run the jobs in turn, again and again, and report each one's median and shortest time, and its processor time."""
    jobs = {name: prepare(name, args) for name in args.jobs}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(args.repeats + 1):
        for name, job in jobs.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            job()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    return [
        {
            "job": name,
            "median_s": round(statistics.median(seconds[name]), 3),
            "min_s": round(min(seconds[name]), 3),
            "median_cpu_s": round(statistics.median(cpu_seconds[name]), 3),
        }
        for name in jobs
    ]


def status_mib(field: str) -> float:
    """Read VmRSS (now) or VmHWM (peak) of this process; Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")


def measure_growth(args: argparse.Namespace) -> dict[str, object]:
    """Run one job once in this fresh process: how far resident memory rises above what the inputs take."""
    (name,) = args.jobs
    job = prepare(name, args)
    before = status_mib("VmRSS")
    job()
    return {"job": name, "inputs_mib": round(before), "growth_mib": round(status_mib("VmHWM") - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=("time", "memory"), default="time")
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frozen-head", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure == "time":
        for row in time_jobs(args):
            print(json.dumps(row))
    elif len(args.jobs) == 1:
        print(json.dumps(measure_growth(args)))
    else:
        options = sys.argv[1:]
        if "--jobs" in options:
            start = options.index("--jobs")
            options[start : start + 1 + len(args.jobs)] = []
        for name in args.jobs:
            subprocess.run([sys.executable, __file__, *options, "--jobs", name], check=True)


if __name__ == "__main__":
    main()
