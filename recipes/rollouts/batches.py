"""Rollout batches one after the other: in turn with training, or sampled ahead in a thread.

The policy version is the number of times that weights were handed over, once after each batch. With
`rollout.max_staleness` 0 a batch is sampled when it is asked for. With n above 0 a thread samples batches as soon as
they can be at most n versions old when their first update starts: batch k once version k - n is there. Groups that
are older all the same are dropped and counted.
"""

import queue
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from datum.errors import DataError
from recipes.rollouts.collect import Collector, RolloutBatch
from recipes.rollouts.sampler import Sampler

__all__ = ["RolloutBatches", "drop_stale"]


class RolloutBatches:
    """The place in the stream of prompts, and the batch under way. A context manager: leaving it ends the thread.

    Args:
        collector: Makes batches.
        sampler: Gets the weights.
        num_steps: Optimizer steps of the whole run.
        updates_per_batch: Optimizer steps of a batch.
        max_staleness: Versions that a sample may be old.
        fingerprint: Of the prompts, which a resumed run has to find again.

    Attributes:
        num_steps: As given.
        batch: The batch under way; None before the first one and between two.
        trained: Batches trained to their end, which is the policy version.
    """

    def __init__(
        self,
        collector: Collector,
        sampler: Sampler,
        *,
        num_steps: int,
        updates_per_batch: int,
        max_staleness: int = 0,
        fingerprint: str = "",
    ):
        self.collector = collector
        self.sampler = sampler
        self.num_steps = num_steps
        self.num_batches = -(-num_steps // updates_per_batch)
        self.max_staleness = max_staleness
        self.fingerprint = fingerprint
        self.batch: RolloutBatch | None = None
        self.trained = 0
        self._place = 0
        self._ahead: queue.Queue[RolloutBatch | Exception] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._may_go_on = threading.Condition()
        self._is_closed = False

    def __enter__(self) -> "RolloutBatches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._may_go_on:
            self._is_closed = True
            self._may_go_on.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=60.0)

    def next(self) -> RolloutBatch:
        """The next batch to train on; every rank must call it.

        Raises:
            RolloutError: No completions can be had.
        """
        if self.max_staleness == 0:
            batch = self.collector.collect(self.trained, self._place)
        else:
            batch = self._take()
        self._place = batch.next_place
        drop_stale(batch, self.trained, self.max_staleness)
        self.batch = batch
        return batch

    def hand_over(self) -> None:
        """End the batch and give the sampler the weights."""
        self.batch = None
        self.sampler.update_weights()
        with self._may_go_on:
            self.trained += 1
            self._may_go_on.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Place, version and the batch under way."""
        return {
            "place": self._place,
            "trained": self.trained,
            "fingerprint": self.fingerprint,
            "batch": None if self.batch is None else self.batch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the weights have to be loaded before `start`.

        Raises:
            DataError: The state belongs to other prompts.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "the checkpoint was trained on other prompts: the environment, the template or the tokenizer changed"
            )
        self._place, self.trained = state["place"], state["trained"]
        self.batch = None if state["batch"] is None else RolloutBatch.from_state(state["batch"])

    def start(self) -> None:
        """Give the sampler the weights that a resumed run loaded, and its version."""
        if self.trained:
            self.sampler.update_weights()
        self.sampler.policy_version = self.trained

    # ------------------------------------------------------------------------------------------------------ in a thread

    def _take(self) -> RolloutBatch:
        if self._thread is None:
            first = self.trained
            self._thread = threading.Thread(target=self._produce, args=(first, self._place), daemon=True)
            self._thread.start()
        item = self._ahead.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _produce(self, index: int, place: int) -> None:
        try:
            while index < self.num_batches:
                with self._may_go_on:
                    while not self._is_closed and index - self.trained > self.max_staleness:
                        self._may_go_on.wait()
                    if self._is_closed:
                        return
                batch = self.collector.collect(index, place)
                index, place = index + 1, batch.next_place
                self._ahead.put(batch)
        except Exception as error:  # the training thread raises it
            self._ahead.put(error)


def drop_stale(batch: RolloutBatch, version: int, max_staleness: int) -> None:
    """Move groups of which a sample is more than `max_staleness` versions old to the batch's stale ones."""
    ages = [version - min(rollout.policy_version for rollout in group) for group in batch.groups]
    batch.stale += [group for group, age in zip(batch.groups, ages, strict=True) if age > max_staleness]
    batch.groups = [group for group, age in zip(batch.groups, ages, strict=True) if age <= max_staleness]
