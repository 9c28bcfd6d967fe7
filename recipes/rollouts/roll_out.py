"""Let the policy answer problems, in one turn or several, with ids in and ids out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.environment import Environment, Problem
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.rollout import Rollout
from recipes.rollouts.sampler import Sampler, SampleRequest, Sampling

__all__ = ["Attempt", "roll_out"]

log = logging.getLogger(__name__)

_reported: set[tuple[str, str]] = set()  # environment and kind of error: each is logged once


@dataclass(frozen=True)
class Attempt:
    """One completion to make.

    Attributes:
        problem: What to answer.
        prompt_ids: Its prompt.
        prompt: Place of the prompt in its stream.
        sample: Place in the group.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    prompt: int
    sample: int


def roll_out(
    attempts: Sequence[Attempt],
    environment: Environment,
    sampler: Sampler,
    encoder: ChatEncoder,
    sampling: Sampling,
    *,
    step: int,
    max_new_tokens: int,
    context: int | None,
    stream: str = "train",
) -> list[Rollout]:
    """Sample completions, and go on with those to which the environment replies.

    Args:
        attempts: What to sample; rollouts come in their order.
        environment: Replies to completions until its `max_turns`.
        sampler: The policy.
        encoder: Of the conversation.
        sampling: Temperature, top-p and top-k.
        step: Rollout batch, or step of an evaluation: part of the noise's key.
        max_new_tokens: Of a turn.
        context: Longest sequence of the model; a rollout that would pass it counts as cut off.
        stream: "train" or "eval".

    Returns:
        Rollouts without rewards.
    """
    rollouts = [
        Rollout(
            attempt.problem.id,
            attempt.prompt,
            attempt.sample,
            attempt.prompt_ids,
            question=str(attempt.problem.messages[-1]["content"]),
            row=attempt.problem.row,
        )
        for attempt in attempts
    ]
    conversations = [list(attempt.problem.messages) for attempt in attempts]
    open_ones = list(range(len(attempts)))
    for turn in range(environment.max_turns):
        requests = [
            SampleRequest(
                prompt_ids=(*rollouts[i].prompt_ids, *rollouts[i].ids),
                prompt=rollouts[i].prompt,
                sample=rollouts[i].sample,
                step=step,
                stream=stream,
                position=len(rollouts[i].ids),
                max_new_tokens=max_new_tokens,
            )
            for i in open_ones
        ]
        continued = []
        for i, completion in zip(open_ones, sampler.sample(requests, sampling), strict=True):
            rollout, problem = rollouts[i], attempts[i].problem
            rollout.policy_version = completion.policy_version if turn == 0 else rollout.policy_version
            rollout.ids += completion.ids
            rollout.sampled += [1] * len(completion.ids)
            rollout.logprobs += completion.logprobs
            rollout.completions.append(encoder.text(completion.ids))
            rollout.is_finished = completion.is_finished
            if not completion.is_finished or turn + 1 == environment.max_turns:
                continue
            try:
                reply = environment.reply(problem, rollout.completions)
                if reply is None:
                    continue
                ids = encoder.reply_ids(conversations[i], _checked(reply), completion.ids[-1])
            except Exception as error:  # the environment's own code: this rollout abstains, the others go on
                rollout.failed = True
                _report(environment, problem, error)
                continue
            if context is not None and len(rollout.prompt_ids) + len(rollout.ids) + len(ids) + max_new_tokens > context:
                rollout.is_finished = False
                continue
            rollout.ids += ids
            rollout.sampled += [0] * len(ids)
            rollout.logprobs += [0.0] * len(ids)
            conversations[i] += [{"role": "assistant", "content": rollout.completions[-1]}, *reply]
            continued.append(i)
        open_ones = continued
        if not open_ones:
            break
    return rollouts


def _checked(reply: Any) -> list[dict[str, Any]]:
    is_reply = isinstance(reply, Sequence) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in reply
    )
    if not is_reply or not reply:
        raise TypeError(f"reply is {reply!r:.200}; accepted are None and a list of messages with role and content")
    return list(reply)


def _report(environment: Environment, problem: Problem, error: Exception) -> None:
    kind = environment.name, type(error).__name__
    if kind not in _reported:
        _reported.add(kind)
        log.warning(
            "environment %s: the reply to problem %s failed: %s: %s. Such rollouts abstain and are counted in "
            "reward/errors; further failures of this kind are not logged",
            environment.name,
            problem.id,
            type(error).__name__,
            error,
        )
