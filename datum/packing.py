"""Who goes with whom: sequences into packed rows, and a step's sequences into microbatches of every rank.

Everything here is a pure function of the lengths and the options, so that every rank computes the same plan by itself.
Which sequences form a step is decided elsewhere; inside a step they may be sorted and balanced, since layout changes
nothing of the result.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from datum.datum import Datum, collate_datums
from datum.errors import DataError

__all__ = ["make_filler", "pack_best_fit", "pack_sequential", "plan_microbatches"]


def pack_sequential(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill rows in the order given, opening the next one when a sequence no longer fits.

    Args:
        lengths: Tokens of each sequence, at least 1.
        max_tokens: Tokens a row holds.

    Returns:
        Rows of indices into `lengths`, in order.

    Raises:
        DataError: a sequence is empty or longer than a row; names its index.
        ValueError: `max_tokens` is no positive integer.

    >>> pack_sequential([3, 3, 2, 2], 5)
    [[0], [1, 2], [3]]
    """
    rows: list[list[int]] = []
    space = 0
    for i, length in enumerate(_checked(lengths, max_tokens)):
        if length > space:
            rows.append([])
            space = max_tokens
        rows[-1].append(i)
        space -= length
    return rows


def pack_best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit-decreasing: the longest first, each into the fullest row that still takes it.

    Args:
        lengths: Tokens of each sequence, at least 1.
        max_tokens: Tokens a row holds.

    Returns:
        Rows of indices into `lengths`, rising within a row; rows in the order of their first index.

    Raises:
        DataError: a sequence is empty or longer than a row; names its index.
        ValueError: `max_tokens` is no positive integer.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973: at most 11/9 of the fewest rows, and a constant.

    >>> pack_best_fit([3, 3, 2, 2], 5)
    [[0, 3], [1, 2]]
    """
    known = np.array(_checked(lengths, max_tokens), dtype=np.int64)
    order = np.argsort(-known, kind="stable")
    falling = known[order]
    starts = np.flatnonzero(np.diff(falling, prepend=0)).tolist()  # of each run of equal lengths
    order = order.tolist()
    rows: list[list[int]] = []
    rows_by_space: defaultdict[int, list[list[int]]] = defaultdict(list)
    spaces = 0  # bit s is set while some row has s tokens of space: the best fit is the lowest bit from `length` up
    for length, start, stop in zip(falling[starts].tolist(), starts, [*starts[1:], len(order)]):
        while start < stop:
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                best = rows_by_space[space]
                row = best.pop()
                if not best:
                    spaces ^= 1 << space
            else:
                space, row = max_tokens, []
                rows.append(row)
            # Having taken one of this length, the row is the best fit for the next of it while there is space.
            taken = order[start : min(stop, start + space // length)]
            row += taken
            start += len(taken)
            space -= len(taken) * length
            if space:
                rows_by_space[space].append(row)
                spaces |= 1 << space
    return sorted(sorted(row) for row in rows)


_PACKERS = {"best_fit": pack_best_fit, "sequential": pack_sequential}


def plan_microbatches(
    lengths: Sequence[int],
    *,
    world_size: int = 1,
    microbatch_size: int | None = None,
    max_tokens: int | None = None,
    packing: str = "best_fit",
    fixed_rows: bool = False,
) -> list[list[list[int]]]:
    """Split one step's sequences into microbatches and deal them to the ranks.

    Every index is in exactly one microbatch, and every rank has the same number of them; an empty one is a filler
    (`make_filler`), needed only where there are not enough sequences to go round.

    Padded (`microbatch_size`): as few microbatches as the size allows, rounded up to a multiple of `world_size`. Each
    takes neighbours in length order, cut so that the largest has the fewest padded cells (rows times longest row). With
    both sizes None a rank pads its whole share at once.
    Packed (`max_tokens`): a microbatch is one packed row, and there are as few rows as the budget allows. With several
    ranks their number is rounded up to a multiple of `world_size` and the tokens are spread evenly over them: no rank
    waits for another's full row.

    Args:
        lengths: Tokens of each sequence of the step, at least 1.
        world_size: Ranks.
        microbatch_size: Padded: the most sequences of a microbatch.
        max_tokens: Packed: the most tokens of a row.
        packing: "best_fit", or "sequential" for rows that are runs of the order given.
        fixed_rows: Rows are a function of the lengths alone, not of the ranks (xdoc: the row is the sample).

    Returns:
        [rank][microbatch] -> indices into `lengths`.

    Raises:
        DataError: no sequence, an empty one, or one above `max_tokens`; names its index.
        ValueError: options out of range, or both sizes given.

    >>> plan_microbatches([5, 1, 4, 2], world_size=2, microbatch_size=2)
    [[[0, 2]], [[3, 1]]]
    >>> plan_microbatches([5, 1, 4, 2], world_size=2, max_tokens=8)
    [[[0, 1]], [[2, 3]]]
    """
    _refuse_options(world_size, microbatch_size, max_tokens, packing, fixed_rows)
    if len(lengths) == 0:
        raise DataError("a step needs at least one sequence; got none")
    if max_tokens is None:
        known = _checked(lengths, None)
        microbatches = _padded_microbatches(known, world_size, microbatch_size)
        work = [len(microbatch) * known[microbatch[0]] for microbatch in microbatches]
    else:
        known = _checked(lengths, max_tokens)
        microbatches = _PACKERS[packing](known, max_tokens)
        if not fixed_rows:
            microbatches = _spread_rows(known, microbatches, world_size, max_tokens, packing)
        work = [sum(known[i] for i in row) for row in microbatches]
    return _deal(microbatches, work, world_size)


def make_filler(keys: Iterable[str], *, packed: bool) -> dict[str, Any]:
    """A one-token batch of weight 0, for a rank without sequences: all ranks run the same number of forwards.

    Args:
        keys: The keys of the batches it stands beside, or those of their Datums' `loss_fn_inputs`.
        packed: The layout of those batches.

    Returns:
        A batch [1, 1] of the same keys and dtypes: token 0, `labels` the ignore index, side inputs 0. Its one position
        is real, not padding, so that attention has something to look at. The extra key `filler` tells whoever counts
        sequences and tokens to leave it out.

    >>> make_filler(["labels", "weights"], packed=False)["labels"]
    tensor([[-100]])
    """
    probe = collate_datums([Datum([0], {"target_tokens": [0]})], packed=packed)
    keys = set(keys)
    side_inputs = dict.fromkeys(sorted(keys - probe.keys() - {"target_tokens"}), 0.0)
    targets = {"target_tokens": [0]} if keys & {"labels", "target_tokens"} else {}
    filler = collate_datums([Datum([0], {**targets, **side_inputs, "weights": 0.0})], packed=packed)
    if "weights" not in keys:
        del filler["weights"]
    return filler | {"filler": True}


# ------------------------------------------------------------------------------------------------------------- helpers


def _checked(lengths: Sequence[int], max_tokens: int | None) -> list[int]:
    if max_tokens is not None:
        _refuse_non_positive("max_tokens", max_tokens)
    known = [int(length) for length in lengths]
    for i, length in enumerate(known):
        if length < 1:
            raise DataError(f"lengths[{i}] is {length}; a sequence has at least one token")
        if max_tokens is not None and length > max_tokens:
            raise DataError(
                f"lengths[{i}] is {length}, but a packed row holds max_tokens={max_tokens}; raise the budget, or "
                "shorten or split the sequence"
            )
    return known


def _padded_microbatches(lengths: list[int], world_size: int, microbatch_size: int | None) -> list[list[int]]:
    """Runs of the descending length order, as many as needed, the largest with as few padded cells as possible."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    size = microbatch_size or len(order)
    count = _forwards(-(-len(order) // size), world_size) * world_size

    def cut(most_cells: int) -> list[list[int]]:
        runs, start = [], 0
        while start < len(order):
            stop = start + max(1, min(size, most_cells // lengths[order[start]]))
            runs.append(order[start:stop])
            start = stop
        return runs

    runs = _least(cut, count, 1, size * lengths[order[0]])
    return _split_up_to(count, runs, lambda run: len(run) * lengths[run[0]])


def _spread_rows(
    lengths: list[int], rows: list[list[int]], world_size: int, max_tokens: int, packing: str
) -> list[list[int]]:
    """As many rows as all ranks together run forwards, of nearly equal tokens."""
    if world_size == 1:
        return rows
    count = _forwards(len(rows), world_size) * world_size
    if packing == "sequential":
        rows = _least(lambda most: pack_sequential(lengths, most), count, max(lengths), max_tokens)
    else:
        rows = _equal_rows(lengths, min(count, len(lengths)), max_tokens) or rows
    return _split_up_to(count, rows, lambda row: sum(lengths[i] for i in row))


def _equal_rows(lengths: list[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first, each into the row of fewest tokens; None if that overflows a row (best fit packs tighter)."""
    rows: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, row) for row in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, row = loads[0]
        if load + lengths[i] > max_tokens:
            return None
        rows[row].append(i)
        heapq.heapreplace(loads, (load + lengths[i], row))
    return sorted(sorted(row) for row in rows)


def _forwards(microbatches: int, world_size: int) -> int:
    return -(-microbatches // world_size)


def _least(cut: Callable[[int], list[list[int]]], count: int, low: int, high: int) -> list[list[int]]:
    """`cut` at the smallest limit that gives at most `count` runs; `high` is known to."""
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return cut(low)


def _split_up_to(count: int, runs: list[list[int]], work: Callable[[list[int]], int]) -> list[list[int]]:
    """Halve the run of most work until there are `count` runs, or each is one sequence."""
    runs = list(runs)
    while len(runs) < count and max(map(len, runs)) > 1:
        i = max(range(len(runs)), key=lambda i: (len(runs[i]) > 1, work(runs[i])))
        middle = len(runs[i]) // 2
        runs[i : i + 1] = [runs[i][:middle], runs[i][middle:]]
    return runs


def _deal(microbatches: list[list[int]], work: list[int], world_size: int) -> list[list[list[int]]]:
    """Largest first, to the rank of least work that still has a forward free; empty microbatches fill the rest."""
    forwards = _forwards(len(microbatches), world_size)
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for i in sorted(range(len(microbatches)), key=lambda i: -work[i]):
        rank = min((rank for rank in range(world_size) if len(ranks[rank]) < forwards), key=lambda rank: load[rank])
        ranks[rank].append(microbatches[i])
        load[rank] += work[i]
    return [rank + [[] for _ in range(forwards - len(rank))] for rank in ranks]


def _refuse_options(
    world_size: int, microbatch_size: int | None, max_tokens: int | None, packing: str, fixed_rows: bool
) -> None:
    _refuse_non_positive("world_size", world_size)
    if microbatch_size is not None:
        _refuse_non_positive("microbatch_size", microbatch_size)
    if microbatch_size is not None and max_tokens is not None:
        raise ValueError(
            f"microbatch_size={microbatch_size} with max_tokens={max_tokens}: a padded microbatch is sized by the one, "
            "a packed one by the other; give one of them"
        )
    if packing not in _PACKERS:
        raise ValueError(f"packing is {packing!r}; accepted are 'best_fit' and 'sequential'")
    if fixed_rows and max_tokens is None:
        raise ValueError("fixed_rows=True without max_tokens: only packed rows can be fixed")


def _refuse_non_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; accepted is a positive integer")
