"""Time `collate_datums` against a bare torch.cat of the same fields and against plain Python lists, in one run.

    python scripts/bench_collate.py                      # 256 Datums, about 270,000 tokens
    python scripts/bench_collate.py --threads 1 --datums 64 --max-length 2048

The bare torch.cat joins the five fields and does nothing else: no checks, no labels, no positions, no padding. The
list reference (datum/collate_reference.py) builds the same batch token by token; its result is first compared to ours.
The quick sides are timed in turn, round by round, and the lists after them, so that their garbage slows nobody else.
"read once" adds one sum over every tensor of the batch: zero padding is memory that the system clears only when it is
first touched. Ratios are given of medians and, for a machine that others use too, of minima.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from datum import Datum, collate_datums
from datum.collate_reference import collate_datums_reference


def make_datums(count: int, max_length: int, seed: int) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(count, generator=generator) * 1.1 + 6.4).exp().long().clamp(1, max_length)
    lengths[0] = max_length
    datums = []
    for length in lengths.tolist():
        ids = torch.randint(0, 50_000, (length + 1,), generator=generator)
        fields = {key: torch.rand(length, generator=generator) for key in ("logprobs", "advantages")}
        weights = (torch.rand(length, generator=generator) < 0.7).float()
        datums.append(Datum(ids[:-1].clone(), {"target_tokens": ids[1:].clone(), "weights": weights, **fields}))
    return datums


def bare_cat(datums: list[Datum]) -> dict[str, torch.Tensor]:
    keys = datums[0].loss_fn_inputs
    return {
        "input_ids": torch.cat([datum.input_ids for datum in datums]),
        **{key: torch.cat([datum.loss_fn_inputs[key] for datum in datums]) for key in keys},
    }


def read_once(batch: dict[str, torch.Tensor]) -> None:
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.numpy().sum()


def time_in_turn(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):  # the first is a warm-up
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datums", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    datums = make_datums(options.datums, options.max_length, options.seed)
    for packed in (False, True):
        got, want = collate_datums(datums, packed=packed), collate_datums_reference(datums, packed=packed)
        same = got.keys() == want.keys() and all(
            value == got[key] if key == "qkv_format" else value.equal(got[key]) for key, value in want.items()
        )
        if not same:
            raise SystemExit(f"packed={packed}: collate_datums and the list reference differ")
    tokens = sum(map(len, datums))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} threads")
    print(f"{len(datums)} Datums, {tokens:,} tokens, longest {options.max_length:,}, 5 fields; times in ms")
    seconds = time_in_turn(
        {
            "bare torch.cat": lambda: bare_cat(datums),
            "packed": lambda: collate_datums(datums, packed=True),
            "padded": lambda: collate_datums(datums),
            "padded, read once": lambda: read_once(collate_datums(datums)),
        },
        options.rounds,
    )
    seconds |= time_in_turn(
        {
            "packed, lists": lambda: collate_datums_reference(datums, packed=True),
            "padded, lists": lambda: collate_datums_reference(datums),
            "padded, read once, lists": lambda: read_once(collate_datums_reference(datums)),
        },
        max(1, options.rounds // 10),
    )
    best = {name: (statistics.median(values), min(values)) for name, values in seconds.items()}
    for name, (median, least) in best.items():
        print(f"{name:26s} median {median * 1e3:9.2f}   min {least * 1e3:9.2f}")
    for name in ("packed", "padded", "padded, read once"):
        print(ratio(best, name, "bare torch.cat"))
    for name in ("packed", "padded", "padded, read once"):
        print(ratio(best, f"{name}, lists", name))


def ratio(best: dict[str, tuple[float, float]], name: str, other: str) -> str:
    median, least = (mine / its for mine, its in zip(best[name], best[other]))
    return f"{name} / {other}: {median:.2f} of medians, {least:.2f} of minima"


if __name__ == "__main__":
    main()
