"""Step k -> this rank's microbatches. Which samples form a step is a function of (seed, k) alone.

Epochs are concatenated: step k takes the positions [k·G, (k+1)·G) of epoch 0's order, then epoch 1's, and so on, with G
the global batch size. The number of ranks, the layout and the microbatch size only decide how these samples are spread
inside the step. So the whole state is one number, the next step, and it is the same on every rank.

    N = 10 samples, G = 4, 2 epochs -> 5 steps; step 2 takes the last 2 samples of epoch 0 and the first 2 of epoch 1
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from datum.dataset import DatumSet
from datum.datum import collate_datums
from datum.errors import DataError
from datum.ledger import Ledger
from datum.order import epoch_order, epoch_size
from datum.packing import make_filler, plan_microbatches

__all__ = ["DatumLoader"]

Batch = dict[str, Any]


class DatumLoader:
    """Iterates over optimizer steps; each gives this rank's collated microbatches.

    Every rank gets the same number of microbatches in a step; a rank short of one gets a filler, one token of weight 0.

    Args:
        dataset: The Datums, with the weights of their sources.
        seed: Seed of the order.
        global_batch_size: Datums of a step, over all ranks.
        epochs: Passes over the data, concatenated; ignored when `max_steps` is given.
        max_steps: Number of steps, as many epochs as they take; None: as many steps as `epochs` need, the last of
            which may have fewer Datums.
        packed: Packed rows of at most `max_tokens` tokens, else padded rows.
        microbatch_size: Padded only: Datums of a microbatch; None: all of a rank's share in one.
        max_tokens: Packed only: tokens of a microbatch.
        packing: Packed only: best_fit or sequential.
        fixed_rows: Packed only: rows are the same for every number of ranks (xdoc, where the row is the sample).
        pad_seq_len_divisible: Row lengths are rounded up to a multiple of it.
        rank: This process.
        world_size: Number of processes.

    Attributes:
        num_steps: Steps of the whole run.
        step: The next step, from 0.

    Raises:
        DataError: A Datum is longer than `max_tokens`.
        ValueError: Arguments that contradict each other.
    """

    def __init__(
        self,
        dataset: DatumSet,
        *,
        seed: int,
        global_batch_size: int,
        epochs: int = 1,
        max_steps: int | None = None,
        packed: bool = False,
        microbatch_size: int | None = None,
        max_tokens: int | None = None,
        packing: str = "best_fit",
        fixed_rows: bool = False,
        pad_seq_len_divisible: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if packed and (max_tokens is None or microbatch_size is not None):
            raise ValueError(
                f"packed: max_tokens={max_tokens} and microbatch_size={microbatch_size}; accepted is max_tokens alone"
            )
        if not packed and (max_tokens is not None or fixed_rows):
            raise ValueError(f"padded: max_tokens={max_tokens}, fixed_rows={fixed_rows} belong to packed=True")
        if global_batch_size < 1 or epochs < 1 or (max_steps is not None and max_steps < 1):
            raise ValueError(
                f"global_batch_size={global_batch_size}, epochs={epochs}, max_steps={max_steps}: "
                "accepted are whole numbers from 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0")
        longest = int(dataset.lengths.argmax())
        if max_tokens is not None and dataset.lengths[longest] > max_tokens:
            raise DataError(
                f"datum {longest} has {dataset.lengths[longest]} positions, above the budget of a packed microbatch, "
                f"max_tokens={max_tokens}; a Datum is never cut: raise the budget or lower data.max_length"
            )
        self.dataset = dataset
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.epoch_size = epoch_size(dataset.sources)
        self.total_samples = epochs * self.epoch_size if max_steps is None else max_steps * global_batch_size
        self.num_steps = -(-self.total_samples // global_batch_size)
        self.step = 0
        self._packed = packed
        self._divisible = pad_seq_len_divisible
        self._rank = rank
        self._plan_options: dict[str, Any] = {
            "world_size": world_size,
            "microbatch_size": microbatch_size,
            "max_tokens": max_tokens,
            "packing": packing,
            "fixed_rows": fixed_rows,
        }
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (step, microbatches) from the next step on.

        A step counts as taken when it is handed out: `state_dict` points behind it while it is being trained on.
        """
        while self.step < self.num_steps:
            step = self.step
            batches = self.microbatches(step)
            self.step = step + 1
            yield step, batches

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """Indices into the data set of the samples of a step, over all ranks: a function of (seed, step) alone."""
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step}: the run has the steps 0 to {self.num_steps - 1}")
        start = step * self.global_batch_size
        stop = min(start + self.global_batch_size, self.total_samples)
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_size)
            parts.append(self._order(epoch)[offset : offset + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def microbatches(self, step: int) -> list[Batch]:
        """This rank's batches of a step, fillers included."""
        ids = self.sample_ids(step)
        return [
            collate_datums(
                [self.dataset[ids[i]] for i in members], packed=self._packed, pad_seq_len_divisible=self._divisible
            )
            if members
            else make_filler(self.dataset.keys, packed=self._packed)
            for members in self._plan(ids)[self._rank]
        ]

    def utilisation(self, step: int) -> float:
        """Share of a step's computed positions, over all ranks, that hold a token."""
        computed, padding = self._positions(self.sample_ids(step))
        return 1 - padding / computed

    def metrics(self, step: int) -> dict[str, float]:
        """`data/epoch`, the passes over the data after a step (from 0), and `data/utilisation` of that step."""
        return {
            "data/epoch": (step + 1) * self.global_batch_size / self.epoch_size,
            "data/utilisation": self.utilisation(step),
        }

    def plan_epoch(self) -> tuple[int, int]:
        """(computed positions, padding positions) of epoch 0 taken by itself, over all ranks."""
        order = self._order(0)
        starts = range(0, len(order), self.global_batch_size)
        counts = [self._positions(order[start : start + self.global_batch_size]) for start in starts]
        return sum(computed for computed, _ in counts), sum(padding for _, padding in counts)

    def count_positions(self, ledger: Ledger) -> None:
        """Enter what one epoch computes into the ledger, and check it."""
        ledger.computed_positions, ledger.padding_positions = self.plan_epoch()
        ledger.resampled_positions = int(self.dataset.lengths[self._order(0)].sum() - self.dataset.lengths.sum())
        ledger.check()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: plain numbers and strings, the same on every rank."""
        return {
            "step": self.step,
            "samples": min(self.step * self.global_batch_size, self.total_samples),
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on any number of ranks and in any layout.

        Raises:
            DataError: The state belongs to other data, another seed or another batch size; or to the smaller last step
                of a run that was shorter than this one, after which this run's samples cannot be the same.
        """
        mine = self.state_dict()
        for key in ("fingerprint", "seed", "global_batch_size"):
            if state[key] != mine[key]:
                hint = (
                    "the rows, the template, the mask or the tokenizer changed"
                    if key == "fingerprint"
                    else "it must stay"
                )
                raise DataError(f"the saved data position has {key}={state[key]}, this run has {mine[key]}: {hint}")
        expected = min(state["step"] * self.global_batch_size, max(self.total_samples, state["samples"]))
        if state["samples"] != expected:
            raise DataError(
                "the saved data position is the end of a shorter run, whose last step had fewer samples "
                f"({state['samples']} after {state['step']} steps, this run takes {expected}); "
                "continue from an earlier checkpoint"
            )
        self.step = state["step"]

    # ------------------------------------------------------------------------------------------------------------ parts

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = epoch_order(self.dataset.sources, self.seed, epoch)
        return self._orders[epoch]

    def _plan(self, ids: npt.NDArray[np.int64]) -> list[list[list[int]]]:
        return plan_microbatches(self.dataset.lengths[ids].tolist(), **self._plan_options)

    def _positions(self, ids: npt.NDArray[np.int64]) -> tuple[int, int]:
        lengths = self.dataset.lengths[ids].tolist()
        computed = 0
        for members in (members for batches in self._plan(ids) for members in batches):
            sizes = [lengths[i] for i in members] or [1]  # a filler computes one position
            width = sum(sizes) if self._packed else max(sizes)
            if members and self._divisible is not None:
                width = -(-width // self._divisible) * self._divisible
            computed += width if self._packed else width * len(sizes)
        return computed, computed - sum(lengths)
