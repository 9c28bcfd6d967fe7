"""What a sampler is asked for and what it gives: the interface between a training loop and any generator of tokens.

Ids go in and ids come out; nothing here is decoded or encoded again, so that the log-probabilities belong to the very
tokens that were sampled. What a request gets depends on nothing but the weights and its own fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Completion", "RolloutError", "SampleRequest", "Sampler", "Sampling"]


class RolloutError(RuntimeError):
    """Completions cannot be had: a server is absent, serves another model, or does not answer."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample.

    Attributes:
        prompt_ids: Everything the model reads, earlier turns included.
        prompt: Place of the prompt in the run's stream of prompts.
        sample: Place of the completion in its group.
        step: Rollout batch, from 0, or the training step for an evaluation.
        stream: "train" or "eval"; keeps the noise of evaluations apart.
        position: Tokens of this rollout that already follow its prompt: the noise position of the first new token.
        max_new_tokens: Longest completion, the stop id included.
    """

    prompt_ids: tuple[int, ...]
    prompt: int
    sample: int
    step: int = 0
    stream: str = "train"
    position: int = 0
    max_new_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled completion.

    Attributes:
        ids: Sampled ids, the stop id included.
        logprobs: Of the sampled ids, at the sampling temperature (at 1 where it is 0); float32 values.
        is_finished: Ended by a stop id; else cut at `max_new_tokens`.
        policy_version: Of the weights it was sampled from.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_finished: bool
    policy_version: int


@dataclass(frozen=True)
class Sampling:
    """From which distribution tokens are drawn: softmax(logits / temperature), cut to top-k, then to top-p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: The fewest most likely tokens that hold this much probability stay; 1 is off.
        top_k: The k most likely tokens stay; 0 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: accepted are finite numbers from 0 (greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: accepted are numbers above 0 up to 1 (off)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: accepted are integers from 0 (off)")

    @property
    def logprob_kind(self) -> Literal["full", "renormalised"]:
        """Whether log-probabilities are of the whole vocabulary's distribution or of the part that is left of it."""
        is_cut = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
        return "renormalised" if is_cut else "full"


class Sampler(Protocol):
    """Something that completes prompts.

    Attributes:
        policy_version: How many times weights were handed over.
    """

    policy_version: int

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        """Complete the prompts; completions come in the order of the requests."""
        ...

    def update_weights(self) -> None:
        """Hand the trainer's weights over, which raises `policy_version` by 1."""
        ...

    def close(self) -> None:
        """Let go of what the sampler holds."""
        ...
