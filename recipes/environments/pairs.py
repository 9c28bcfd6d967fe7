"""Unordered pairs of numbers, some of them held out; how many there are does not matter, since none is listed."""

import random
from math import isqrt

__all__ = ["split_pairs"]

_SPLIT_SEED = 20250101


def split_pairs(
    low: int, high: int, train: int, heldout: int, seed: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs (a, b) with low <= a <= b <= high, for training and held out.

    Which ones are held out depends on their number alone, not on the seed: another run trains none of them either.

    Args:
        low: Smallest number.
        high: Largest number.
        train: Pairs to train on, in an order that the seed gives; all that are left if there are fewer.
        heldout: Pairs to hold out, fewer than there are.
        seed: Chooses and orders the training pairs.
    """
    numbers = high - low + 1
    count = numbers * (numbers + 1) // 2
    held = random.Random(_SPLIT_SEED).sample(range(count), heldout)
    taken = set(held)
    drawn = random.Random(seed).sample(range(count), min(count, train + heldout))
    left = [index for index in drawn if index not in taken]
    return [_pair(index, low) for index in left[:train]], [_pair(index, low) for index in held]


def _pair(index: int, low: int) -> tuple[int, int]:
    """0, 1, 2, 3, 4, 5 -> (0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2), each number plus `low`."""
    larger = (isqrt(8 * index + 1) - 1) // 2
    return index - larger * (larger + 1) // 2 + low, larger + low
