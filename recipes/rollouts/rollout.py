"""One rollout: a completion of one or several turns, with what the loss needs of it; and its Datum.

`ids` follows the prompt and holds the turns that were sampled and, between them, what the environment replied. Replies
weigh 0: the policy did not produce them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from datum import Datum

__all__ = ["Rollout", "to_datum"]


@dataclass
class Rollout:
    """A completion and its fate.

    Attributes:
        problem: Id of the problem.
        prompt: Place of the prompt in the run's stream; completions of one place are a group.
        sample: Place in the group.
        prompt_ids: Prompt.
        ids: Everything after it.
        sampled: 1 where the policy sampled the id, 0 where the environment replied.
        logprobs: Of the sampled ids under the sampler; 0 elsewhere.
        completions: Text of each sampled turn.
        is_finished: The last turn ended by a stop id.
        policy_version: Of the oldest weights it was sampled from.
        question: The last message of the prompt, to be shown.
        row: What rewards read of the problem.
        rewards: Each reward function's; None where it abstained.
        reward: Weighted sum; None where the rollout abstains.
        advantage: None before it is known, and in groups that are not trained.
        is_masked: Trained with weight 0 (cut off, or abstained).
        failed: The environment's reply raised an error.
        old_logprobs: By the trainer before the batch's first update, where it computes them.
        ref_logprobs: By the reference, where there is one.
    """

    problem: str
    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    is_finished: bool = False
    policy_version: int = 0
    question: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    is_masked: bool = False
    failed: bool = False
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.sampled)


def to_datum(rollout: Rollout, *, unmasked: bool = False) -> Datum:
    """The Datum of a rollout: shifted by one, weight 1 at sampled ids, the advantage a number for the sequence.

    All weights of a masked rollout are 0, unless `unmasked`.

    >>> rollout = Rollout("p", 0, 0, (5, 6), [7, 8, 9, 4], [1, 1, 0, 1], [-0.5, -1.0, 0.0, -2.0], advantage=1.5)
    >>> datum = to_datum(rollout)
    >>> datum.input_ids.tolist(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([5, 6, 7, 8, 9], [6, 7, 8, 9, 4])
    >>> datum.loss_fn_inputs["weights"].tolist(), datum.loss_fn_inputs["logprobs"].tolist()
    ([0.0, 1.0, 1.0, 0.0, 1.0], [0.0, -0.5, -1.0, 0.0, -2.0])
    """
    ids = torch.tensor([*rollout.prompt_ids, *rollout.ids])
    before = len(rollout.prompt_ids) - 1  # targets that belong to the prompt
    weight = 0.0 if rollout.is_masked and not unmasked else 1.0

    def shifted(values: list[float] | list[int]) -> torch.Tensor:
        return torch.tensor([0.0] * before + [float(value) for value in values])

    fields = {
        "target_tokens": ids[1:],
        "weights": shifted(rollout.sampled) * weight,
        "logprobs": shifted(rollout.logprobs),
        "advantages": torch.tensor(0.0 if rollout.advantage is None else rollout.advantage),
    }
    for name in ("old_logprobs", "ref_logprobs"):
        values = getattr(rollout, name)
        if values is not None:
            fields[name] = shifted(values)
    return Datum(ids[:-1], fields)
