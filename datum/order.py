"""The order of samples: a pure function of (seed, epoch), the same on every rank, machine and NumPy version.

A permutation is the stable argsort of raw 64-bit words of the Philox counter-based generator, whose stream is fixed by
definition, unlike that of `Generator.permutation`.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["epoch_order", "epoch_size", "shuffled"]

Sources = int | Sequence[tuple[int, float]]
"""Number of samples, or (number of samples, weight) of each source; the samples of a source are consecutive."""


def shuffled(count: int, seed: int, *, epoch: int = 0, stream: int = 0) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that is a function of the arguments; streams are independent of each other."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)  # of a list, NumPy would make floats from 2**63 on
    words = np.random.Philox(key=key, counter=[0, 0, 0, stream]).random_raw(count)
    return np.argsort(words, kind="stable")


def epoch_size(sources: Sources) -> int:
    """Samples of one epoch; the same for every epoch."""
    return sum(copies * count + share for count, copies, share in _portions(sources))


def epoch_order(sources: Sources, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Indices of the samples of one epoch, in order.

    A source of weight w appears w times: floor(w) copies of all its samples, and a share of round((w - floor(w)) · n)
    of them (of a weight below 1 at least one). Shares of successive epochs follow each other through a seeded order of
    the source, so weight 0.5 shows every sample once in two epochs.

    Args:
        sources: Number of samples, or (number, weight) of each source.
        seed: Seed of the run.
        epoch: From 0.

    Returns:
        [epoch_size(sources)] int64.
    """
    chosen, start = [], 0
    for number, (count, copies, share) in enumerate(_portions(sources)):
        chosen += [np.arange(start, start + count)] * copies
        if share:
            order = shuffled(count, seed, stream=3 + number)
            chosen.append(start + order[(epoch * share + np.arange(share)) % count])
        start += count
    samples = np.concatenate(chosen)
    return samples[shuffled(len(samples), seed, epoch=epoch)]


def _portions(sources: Sources) -> list[tuple[int, int, int]]:
    """(number of samples, whole copies an epoch, samples of the partial copy) of each source."""
    if isinstance(sources, int):
        return [(sources, 1, 0)]
    portions = []
    for count, weight in sources:
        copies = math.floor(weight)
        share = round((weight - copies) * count)
        portions.append((count, copies, max(share, 1) if copies == 0 else share))
    return portions
