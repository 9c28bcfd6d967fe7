"""Evaluation of a policy on held-out problems: greedy, sampled, and pass@k."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from conf.policy import PolicyEvalConfig, RolloutConfig, Unfinished
from recipes.environments.environment import Environment
from recipes.environments.rewards import RewardRunner
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.collect import reward_rollouts
from recipes.rollouts.roll_out import Attempt, roll_out
from recipes.rollouts.rollout import Rollout
from recipes.rollouts.sampler import Sampler, Sampling
from recipes.training.ranks import rank_and_world, sum_over_ranks

__all__ = ["PolicyEvaluation"]

log = logging.getLogger(__name__)


class PolicyEvaluation:
    """Held-out problems, ready to be answered at any step; each rank answers its share.

    The verdict is the environment's first reward; a completion counts as right where it is at least 1.

    Args:
        environment: Problems and replies.
        rewards: Scores completions.
        sampler: Answers with the weights in training.
        encoder: Of conversations.
        config: How often, how many problems, how many samples of each.
        rollout: Temperature and lengths of training.
        unfinished: Reward of a completion that was cut off.
        context: Longest sequence of the model.
        device: Where ranks sum.
    """

    def __init__(
        self,
        environment: Environment,
        rewards: RewardRunner,
        sampler: Sampler,
        encoder: ChatEncoder,
        config: PolicyEvalConfig,
        rollout: RolloutConfig,
        *,
        unfinished: Unfinished,
        context: int | None,
        device: torch.device | str = "cpu",
    ):
        self.environment = environment
        self.rewards = rewards
        self.sampler = sampler
        self.encoder = encoder
        self.config = config
        self.rollout = rollout
        self.unfinished = unfinished
        self.context = context
        self.device = device
        rank, world_size = rank_and_world()
        problems = list(environment.heldout)[: config.max_rows]
        prompts = [encoder.prompt_ids(problem.messages, f"problem {problem.id}") for problem in problems]
        self.problems = list(zip(range(len(problems)), problems, prompts))[rank::world_size]
        self.verdict = next(iter(environment.rewards))

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after `step` of `num_steps`; the last step always is."""
        return step % self.config.every_steps == 0 or step == num_steps

    def metrics(self) -> list[str]:
        """Names of what `run` measures."""
        sampled = ["eval/sampled_accuracy", f"eval/pass_at_{self.config.samples}"] if self.config.samples else []
        return ["eval/accuracy", "eval/reward", "eval/truncated_frac", "eval/abstained_frac", *sampled]

    def run(self, step: int) -> dict[str, float | None]:
        """Answer all problems and log the result; every rank must call it, and all get the same numbers.

        pass@k is the share of problems of which one of the k samples is right. A completion that abstains counts
        neither as right nor as wrong, and its problem not in pass@k.
        """
        greedy = self._answer(step, Sampling(0.0), samples=1)
        sums = _Sums()
        for rollout in greedy:
            verdict = self._verdict(rollout)
            sums.add("eval/accuracy", _is_right(verdict))
            sums.add("eval/abstained_frac", float(verdict is None))
            sums.add("eval/reward", rollout.reward)
            sums.add("eval/truncated_frac", float(not rollout.is_finished))
        k = self.config.samples
        if k:
            sampled = self._answer(step, Sampling(self.rollout.temperature), samples=k)
            for start in range(0, len(sampled), k):
                verdicts = [v for v in map(self._verdict, sampled[start : start + k]) if v is not None]
                for verdict in verdicts:
                    sums.add("eval/sampled_accuracy", _is_right(verdict))
                if len(verdicts) == k:
                    sums.add(f"eval/pass_at_{k}", float(any(verdict >= 1 for verdict in verdicts)))
        row = sums.means(self.metrics(), self.device)
        shown = [f"{key.removeprefix('eval/')} {'-' if v is None else f'{v:.4f}'}" for key, v in row.items()]
        log.info("eval after step %d: %s", step, ", ".join(shown))
        for rollout in greedy[: self.config.show_samples]:
            self._show(rollout)
        return row

    def _answer(self, step: int, sampling: Sampling, *, samples: int) -> list[Rollout]:
        attempts = [
            Attempt(problem, prompt_ids, number, sample)
            for number, problem, prompt_ids in self.problems
            for sample in range(samples)
        ]
        rollouts = roll_out(
            attempts,
            self.environment,
            self.sampler,
            self.encoder,
            sampling,
            step=step,
            max_new_tokens=self.rollout.max_new_tokens,
            context=self.context,
            stream="eval",
        )
        reward_rollouts(rollouts, self.rewards, self.unfinished)
        return rollouts

    def _verdict(self, rollout: Rollout) -> float | None:
        return rollout.rewards.get(self.verdict)

    def _show(self, rollout: Rollout) -> None:
        question = " ".join(rollout.question.split())
        answer = " / ".join(rollout.completions)
        verdict = self._verdict(rollout)
        note = f"expected {rollout.row['answer']}" if "answer" in rollout.row else "wrong"
        if verdict is None or verdict >= 1:
            note = "abstains" if verdict is None else "right"
        cut_off = "" if rollout.is_finished else " (not ended)"
        log.info("  %s => %s%s   [%s]", question[-100:], " ".join(answer.split())[-100:], cut_off, note)


def _is_right(verdict: float | None) -> float | None:
    return None if verdict is None else float(verdict >= 1)


class _Sums:
    """Sums and counts by name, to be added over ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, value: float | None) -> None:
        if value is not None:
            entry = self.sums.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += 1

    def means(self, names: Sequence[str], device: Any) -> dict[str, float | None]:
        values = torch.tensor([self.sums.get(name, [0.0, 0.0]) for name in names], dtype=torch.float64, device=device)
        totals = sum_over_ranks(values).tolist()
        return {name: total / count if count else None for name, (total, count) in zip(names, totals, strict=True)}
