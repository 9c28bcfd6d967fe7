"""From a rollout batch to optimizer steps: advantages, log-probabilities before the first update, microbatches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.policy import GRPOConfig, KLPlace, PolicyLossConfig
from conf.schema import Layout
from datum import collate_datums
from datum.order import shuffled
from datum.packing import make_filler, plan_microbatches
from recipes.losses.advantages import group_advantages, kl_in_reward
from recipes.losses.aggregate import select_tokens
from recipes.models.scoring import ScoringModel
from recipes.rollouts.collect import RolloutBatch
from recipes.rollouts.rollout import Rollout, to_datum
from recipes.training.ranks import gather_over_ranks, rank_and_world
from recipes.training.reference import Reference

__all__ = ["Updates", "set_advantages"]

_SHUFFLE = 7  # stream of the orders of a batch's samples


def set_advantages(batch: RolloutBatch, config: GRPOConfig) -> None:
    """Set the advantage of every rollout to train on.

    With loss.kl.place=reward a rollout's reward for this purpose is less by coef * sum(o - ref).
    """
    loss = config.loss
    kl = loss.kl if isinstance(loss, PolicyLossConfig) and loss.kl.place == KLPlace.reward else None

    def reward(rollout: Rollout) -> float | None:
        if rollout.reward is None or kl is None or kl.coef == 0 or rollout.ref_logprobs is None:
            return rollout.reward
        old = rollout.logprobs if rollout.old_logprobs is None else rollout.old_logprobs
        return rollout.reward - kl.coef * kl_in_reward(old, rollout.ref_logprobs, rollout.sampled)

    rewards = [[reward(rollout) for rollout in group] for group in batch.groups]
    advantages = group_advantages(
        rewards, config.advantage.name, eps=config.advantage.eps, std=config.advantage.std.value
    )
    for group, values in zip(batch.groups, advantages, strict=True):
        if values is None:  # the collector has taken such groups out
            raise AssertionError(f"the group of prompt {group[0].prompt} has too few rewards for its baseline")
        for rollout, value in zip(group, values, strict=True):
            rollout.advantage = value


class Updates:
    """The optimizer steps of a rollout batch.

    The samples are cut into `train.global_batch_size` parts; where groups were dropped, into as many parts of nearly
    equal size. One update a batch keeps the samples' order; more take them in orders that are functions of the seed,
    the batch and the pass.

    Args:
        batch: Groups to train on; None is a batch without any.
        config: Options.
    """

    def __init__(self, batch: RolloutBatch | None, config: GRPOConfig):
        count = config.updates_per_batch
        number = 0 if batch is None else batch.index
        self.rollouts = [] if batch is None else batch.rollouts
        self.config = config
        self.is_packed = config.collate.layout == Layout.packed
        size = len(self.rollouts)
        parts = count // config.rollout.epochs
        self.members: list[list[int]] = []
        for epoch in range(config.rollout.epochs):
            order = np.arange(size)
            if count > 1 and size:
                order = shuffled(size, config.train.seed, epoch=number * config.rollout.epochs + epoch, stream=_SHUFFLE)
            self.members += [part.tolist() for part in np.array_split(order, parts)]
        self.parts = parts

    def places(self, update: int) -> list[int]:
        """Places in the stream of prompts that an update trains on, each once."""
        return sorted({rollout.prompt for rollout in self.rollouts_of(update)})

    def has_signal(self, update: int) -> bool:
        """Whether any advantage of an update that is trained is not 0."""
        return any(rollout.advantage and not rollout.is_masked for rollout in self.rollouts_of(update))

    def rollouts_of(self, update: int) -> list[Rollout]:
        """Rollouts of an update, over all ranks."""
        return [self.rollouts[i] for i in self.members[update]]

    def microbatches(self, update: int) -> list[dict[str, Any]]:
        """This rank's collated microbatches of an update, fillers included."""
        rollouts = self.rollouts_of(update)
        return [self._collate([rollouts[i] for i in members]) for members in self._plan(rollouts)]

    @torch.no_grad()
    def score(self, name: str, scorer: ScoringModel | Reference, exchange: Any = None) -> None:
        """Set log-probabilities of all rollouts, in the layout of the first pass's updates; every rank must call it.

        Args:
            name: `old_logprobs` or `ref_logprobs`.
            scorer: Called with (batch, targets, selected, temperature); dropout is off meanwhile.
            exchange: Process group for what ranks tell each other.
        """
        scoring = scorer if isinstance(scorer, ScoringModel) else scorer.scoring
        was_training = scoring.training
        scoring.eval()
        mine = [scored for update in range(self.parts) for scored in self._score(self.members[update], scorer, False)]
        # Tokens that are not trained are scored apart, so that the trained ones stand as they will in the update.
        mine += self._score([i for i, rollout in enumerate(self.rollouts) if rollout.is_masked], scorer, True)
        scoring.train(was_training)
        for index, values in (scored for part in gather_over_ranks(mine, exchange) for scored in part):
            rollout, given = self.rollouts[index], iter(values)
            setattr(rollout, name, [next(given) if sampled else 0.0 for sampled in rollout.sampled])

    def _score(
        self, indices: Sequence[int], scorer: ScoringModel | Reference, unmasked: bool
    ) -> list[tuple[int, list[float]]]:
        """Log-probabilities of the sampled tokens of this rank's share of some rollouts, by index."""
        scoring = scorer if isinstance(scorer, ScoringModel) else scorer.scoring
        device = next(scoring.parameters()).device
        rollouts, scored = [self.rollouts[i] for i in indices], []
        for members in self._plan(rollouts):
            batch = self._collate([rollouts[i] for i in members], unmasked=unmasked)
            batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            tokens, selected, targets = select_tokens(batch)
            scores = scorer(batch, targets, selected, temperature=self.config.rollout.temperature)
            for number, member in enumerate(members):
                if unmasked or not rollouts[member].is_masked:
                    scored.append((indices[member], scores.logprobs[tokens.sequence == number].tolist()))
        return scored

    def _plan(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        rank, world_size = rank_and_world()
        if not rollouts:
            return [[]]
        lengths = [len(rollout.prompt_ids) + len(rollout.ids) - 1 for rollout in rollouts]
        plan = plan_microbatches(
            lengths,
            world_size=world_size,
            microbatch_size=self.config.train.microbatch_size,
            max_tokens=(self.config.collate.max_tokens or max(4096, *lengths)) if self.is_packed else None,
            packing=self.config.collate.packing.value,
        )
        return plan[rank]

    def _collate(self, rollouts: Sequence[Rollout], *, unmasked: bool = False) -> dict[str, Any]:
        if not rollouts:
            example = to_datum(self.rollouts[0] if self.rollouts else Rollout("", 0, 0, (0, 0)))
            return make_filler(example.loss_fn_inputs, packed=self.is_packed)
        return collate_datums(
            [to_datum(rollout, unmasked=unmasked) for rollout in rollouts],
            packed=self.is_packed,
            pad_seq_len_divisible=self.config.collate.pad_seq_len_divisible,
        )
