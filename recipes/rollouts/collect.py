"""One rollout batch: prompts in the order of (seed, place), groups of completions, rewards, from all ranks.

Each rank samples whole groups. Then every rank holds all of them, in the order of their prompts, so that statistics of
a group or of the batch, and everything that is planned from them, are the same for any number of ranks.

Groups whose rewards are all equal teach nothing under a group baseline. They are kept, dropped, or replaced by groups
of further prompts, in at most `rollout.max_refills` more rounds. What is dropped counts in no denominator of the loss.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from conf.policy import Overlong, RolloutConfig, Unfinished, ZeroVariance
from datum.order import epoch_order
from recipes.environments.environment import Environment, Problem
from recipes.environments.rewards import RewardRunner
from recipes.losses.advantages import length_penalty
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.roll_out import Attempt, roll_out
from recipes.rollouts.rollout import Rollout
from recipes.rollouts.sampler import Sampler, Sampling
from recipes.training.ranks import gather_over_ranks, rank_and_world

__all__ = ["Collector", "Prompts", "RolloutBatch", "has_zero_variance", "reward_rollouts"]

Group = list[Rollout]


class Prompts:
    """The stream of prompts: epochs of the problems, each in an order of its own.

    Args:
        problems: Problems to train on.
        encoder: Renders their prompts, each once.
        seed: Of the order.

    Raises:
        DataError: A prompt cannot be rendered; names the problem.
    """

    def __init__(self, problems: Sequence[Problem], encoder: ChatEncoder, seed: int):
        self.problems = problems
        self.ids = [encoder.prompt_ids(problem.messages, f"problem {problem.id}") for problem in problems]
        self.seed = seed
        self._order: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.problems)

    def attempts(self, place: int, group_size: int) -> list[Attempt]:
        """The completions to make at a place of the stream, from 0: a function of (seed, place) alone."""
        epoch, offset = divmod(place, len(self.problems))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self.problems), self.seed, epoch)
        index = int(self._order[1][offset])
        return [Attempt(self.problems[index], self.ids[index], place, sample) for sample in range(group_size)]


@dataclass
class RolloutBatch:
    """Groups of one rollout batch, the same on every rank.

    Attributes:
        index: Number of the batch, from 0.
        next_place: Place in the stream of prompts behind this batch.
        groups: Groups to train on, in the order of their prompts.
        dropped: Groups without variance that were dropped.
        no_baseline: Groups with fewer rewards than the advantage needs: two for a baseline of the group, else one.
        stale: Groups that were too old to train on.
        errors: Reward calls and replies that failed.
        rollout_s: Time that sampling and rewarding took on this rank.
    """

    index: int
    next_place: int
    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    no_baseline: list[Group] = field(default_factory=list)
    stale: list[Group] = field(default_factory=list)
    errors: int = 0
    rollout_s: float = 0.0

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts to train on."""
        return [rollout for group in self.groups for rollout in group]

    def state_dict(self) -> dict[str, Any]:
        """The batch as JSON can hold it; log-probabilities keep every bit, what only rewards read is left out."""
        bare = [[replace(rollout, row={}) for rollout in group] for group in self.groups]
        return asdict(replace(self, groups=bare, dropped=[], no_baseline=[], stale=[]))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RolloutBatch":
        """Inverse of `state_dict`."""
        groups = [[Rollout(**item | {"prompt_ids": tuple(item["prompt_ids"])}) for item in g] for g in state["groups"]]
        return cls(**dict(state) | {"groups": groups})


class Collector:
    """Makes rollout batches.

    Args:
        prompts: Where prompts come from.
        environment: Replies to completions.
        rewards: Scores them.
        sampler: The policy.
        encoder: Of conversations.
        config: Group size, lengths, what happens to groups without variance and to cut-off completions.
        unfinished: Reward of a completion that was cut off.
        context: Longest sequence of the model.
        needs_baseline: A group needs two rewards at least.
        exchange: Process group for what ranks tell each other; None: the default one.
    """

    def __init__(
        self,
        prompts: Prompts,
        environment: Environment,
        rewards: RewardRunner,
        sampler: Sampler,
        encoder: ChatEncoder,
        config: RolloutConfig,
        *,
        unfinished: Unfinished,
        context: int | None = None,
        needs_baseline: bool = True,
        exchange: Any = None,
    ):
        self.prompts = prompts
        self.environment = environment
        self.rewards = rewards
        self.sampler = sampler
        self.encoder = encoder
        self.config = config
        self.unfinished = unfinished
        self.context = context
        self.needs_baseline = needs_baseline
        self.exchange = exchange
        self.sampling = Sampling(config.temperature, config.top_p, config.top_k)

    def collect(self, index: int, place: int) -> RolloutBatch:
        """Sample and reward batch `index`, whose first prompt is at `place`; every rank must call it.

        Raises:
            RolloutError: No completions can be had.
            RewardShapeError: A reward function returned the wrong shape.
        """
        started = time.perf_counter()
        batch = RolloutBatch(index, place)
        is_refilled = self.config.zero_variance == ZeroVariance.refill
        rounds = 1 + (self.config.max_refills if is_refilled else 0)
        for _ in range(rounds):
            wanted = self.config.prompts_per_step - len(batch.groups)
            if wanted == 0:
                break
            groups, errors = self._round(index, batch.next_place, wanted)
            batch.next_place += wanted
            batch.errors += errors
            for group in groups:
                self._fate(group, batch).append(group)
        batch.rollout_s = time.perf_counter() - started
        return batch

    def _fate(self, group: Group, batch: RolloutBatch) -> list[Group]:
        """Which of the batch's lists a group belongs to."""
        if sum(rollout.reward is not None for rollout in group) < (2 if self.needs_baseline else 1):
            return batch.no_baseline
        drops = self.config.zero_variance != ZeroVariance.keep and has_zero_variance(group)
        return batch.dropped if drops else batch.groups

    def _round(self, index: int, place: int, count: int) -> tuple[list[Group], int]:
        """Groups of `count` prompts from `place` on, of all ranks, and failed calls."""
        rank, world_size = rank_and_world()
        mine = range(place + rank, place + count, world_size)
        attempts = [attempt for p in mine for attempt in self.prompts.attempts(p, self.config.group_size)]
        rollouts, errors = [], 0
        failure: BaseException | None = None
        try:
            rollouts = roll_out(
                attempts,
                self.environment,
                self.sampler,
                self.encoder,
                self.sampling,
                step=index,
                max_new_tokens=self.config.max_new_tokens,
                context=self.context,
            )
            errors = reward_rollouts(rollouts, self.rewards, self.unfinished)
            self._judge_length(rollouts)
        except Exception as error:
            failure = error
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        gathered = gather_over_ranks((rollouts, errors, problem), self.exchange)
        if failure is not None:
            raise failure
        for _, _, problem in gathered:
            if problem is not None:
                raise RuntimeError(f"another rank could not collect rollouts: {problem}")
        by_place: dict[int, Group] = {}
        for rollout in (rollout for part, _, _ in gathered for rollout in part):
            by_place.setdefault(rollout.prompt, []).append(rollout)
        return [by_place[p] for p in range(place, place + count)], sum(errors for _, errors, _ in gathered)

    def _judge_length(self, rollouts: Sequence[Rollout]) -> None:
        """Mask what was cut off, or take off for length; a rollout that abstains is masked in any case."""
        for rollout in rollouts:
            if self.config.overlong == Overlong.penalty and self.config.penalty_tokens and rollout.reward is not None:
                rollout.reward += length_penalty(
                    rollout.num_sampled, self.config.max_new_tokens, self.config.penalty_tokens
                )
            is_cut_off = self.config.overlong == Overlong.mask and not rollout.is_finished
            rollout.is_masked = rollout.reward is None or is_cut_off


def reward_rollouts(rollouts: Sequence[Rollout], rewards: RewardRunner, unfinished: Unfinished) -> int:
    """Set the rewards of rollouts; returns how many calls failed.

    The text that is scored is the last turn's. With unfinished=zero a rollout that was cut off gets 0 from every
    reward without being scored. One whose environment failed abstains.
    """
    zero = [r for r in rollouts if not r.is_finished and not r.failed and unfinished == Unfinished.zero]
    for rollout in zero:
        rollout.rewards = dict.fromkeys(rewards.rewards, 0.0)
        rollout.reward = 0.0
    skipped = {id(rollout) for rollout in zero}
    scored = [r for r in rollouts if id(r) not in skipped and not r.failed]
    scores = rewards.score([r.completions[-1] for r in scored], [r.row for r in scored])
    for position, rollout in enumerate(scored):
        rollout.rewards = {name: values[position] for name, values in scores.by_name.items()}
        rollout.reward = scores.total[position]
    return scores.errors + sum(rollout.failed for rollout in rollouts)


def has_zero_variance(group: Sequence[Rollout]) -> bool:
    """Whether a group has two rewards or more, those that abstained apart, and all of them are equal."""
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    return len(rewards) > 1 and len(set(rewards)) == 1
