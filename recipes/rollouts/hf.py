"""`rollout=hf`: completions by the model in training itself, in the same process.

The log-probabilities are those that the trainer computes: the same weights, kernels, dtype and temperature, which
leaves the rounding of another order of summation. With `own_copy` they come from a copy whose weights change in
`update_weights` alone, so that sampling may run in another thread than training.
"""

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.policy import RolloutConfig
from recipes.models.build import LanguageModel
from recipes.models.scoring import base_of
from recipes.rollouts.generate import evaluating, generate, read_decoding
from recipes.rollouts.noise import batch_uniforms
from recipes.rollouts.sampler import Completion, RolloutError, SampleRequest, Sampling
from recipes.training.answers import stop_ids

__all__ = ["HFSampler", "build"]

log = logging.getLogger(__name__)


class HFSampler:
    """Samples from a Transformers or PEFT model.

    Args:
        language_model: The model in training; it is left in the mode it was in.
        seed: Of the noise.
        batch_size: Most completions decoded together; it changes nothing but time and memory.
        autocast: Makes the context that the model runs in.
        own_copy: Sample from a copy of the model, as it was at the last `update_weights` (or at construction).

    Attributes:
        policy_version: How many times weights were handed over.
        stops: Ids that end a completion.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        seed: int,
        batch_size: int = 256,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        own_copy: bool = False,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: accepted are integers from 1")
        self.policy_version = 0
        self.stops = stop_ids(language_model.model, language_model.tokenizer)
        self._source = language_model.model
        # The copy keeps requires_grad: without, products are formed in another way, and the last bits differ.
        self._model = copy.deepcopy(self._source) if own_copy else self._source
        self._own_copy = own_copy
        self._seed, self._batch_size, self._autocast = seed, batch_size, autocast
        self._vocab_size, self._max_positions = language_model.vocab_size, language_model.max_positions
        self._lock = threading.Lock()
        self._decoding = read_decoding(self._model, language_model.scoring.axes)
        if not self._decoding.has_cache:
            log.warning("sampling reads whole prefixes for every token, which is slow: %s", self._decoding.reason)

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        """Complete the prompts; completions come in the order of the requests.

        Raises:
            ValueError: A prompt is empty, has an id that the model lacks, or leaves no room for its completion.
            RolloutError: Logits are not finite.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        completions: list[Completion | None] = [None] * len(requests)
        with self._lock, evaluating(self._model), self._autocast():
            for chosen in self._batches(requests):
                for index, completion in zip(chosen, self._sample_batch([requests[i] for i in chosen], sampling)):
                    completions[index] = completion
        return completions  # type: ignore[return-value]

    @torch.no_grad()
    def update_weights(self) -> None:
        """Count a new version; with a copy, take over the trainer's parameters and buffers, between two samplings."""
        with self._lock:
            if self._own_copy:
                for mine, theirs in (
                    (self._model.named_parameters(), self._source.named_parameters()),
                    (self._model.named_buffers(), self._source.named_buffers()),
                ):
                    for (_, old), (_, new) in zip(mine, theirs, strict=True):
                        old.copy_(new)
            self.policy_version += 1

    def close(self) -> None:
        """Nothing is held but the copy, which goes with the sampler."""

    def _check(self, index: int, request: SampleRequest) -> None:
        ids, new = request.prompt_ids, request.max_new_tokens
        if not ids:
            raise ValueError(f"request {index}: the prompt is empty; a completion needs at least one token before it")
        if new < 1:
            raise ValueError(f"request {index}: max_new_tokens={new}; accepted are integers from 1")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"request {index}: the prompt has id {wrong}; the model has ids 0 to {self._vocab_size - 1}"
            )
        if self._max_positions is not None and len(ids) + new > self._max_positions:
            raise ValueError(
                f"request {index}: a prompt of {len(ids)} tokens and max_new_tokens={new} need {len(ids) + new} "
                f"positions; the model has {self._max_positions}: shorten the prompt or rollout.max_new_tokens"
            )

    def _batches(self, requests: Sequence[SampleRequest]) -> Iterator[list[int]]:
        """Indices of the requests of each batch, similar lengths together; equal ones where padding is not possible."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids, i))
        groups: dict[int, list[int]] = defaultdict(list)
        for i in order:
            groups[0 if self._decoding.has_padding else len(requests[i].prompt_ids)].append(i)
        for group in groups.values():
            for start in range(0, len(group), self._batch_size):
                yield group[start : start + self._batch_size]

    def _sample_batch(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        device = base_of(self._model).device
        places: dict[tuple[int, ...], int] = {}
        prompt_of_row = [places.setdefault(request.prompt_ids, len(places)) for request in requests]
        limits = [request.max_new_tokens for request in requests]
        noise = torch.from_numpy(batch_uniforms(self._seed, requests, max(limits)))
        drawn = generate(
            self._model,
            self._decoding,
            list(places),
            torch.tensor(prompt_of_row, device=device),
            noise.float().to(device) if device.type == "mps" else noise.to(device),
            torch.tensor(limits, device=device),
            self._stop_table(device),
            sampling,
        )
        is_drawn = torch.arange(max(limits), device=device) < drawn.lengths[:, None]
        if not bool((drawn.logprobs.isfinite() | ~is_drawn).all()):
            raise RolloutError(
                f"the model gives logits that are not finite (policy version {self.policy_version}): look at the loss "
                "and the gradient norm of the steps before; a lower optim.lr may help"
            )
        columns = (drawn.ids, drawn.logprobs, drawn.lengths, drawn.is_finished)
        return [
            Completion(tuple(ids[:length]), tuple(logprobs[:length]), is_finished, self.policy_version)
            for ids, logprobs, length, is_finished in zip(*(column.tolist() for column in columns))
        ]

    def _stop_table(self, device: torch.device) -> Tensor:
        """[ids] bool, as long as the head is wide."""
        head = base_of(self._model).get_output_embeddings()
        table = torch.zeros(max(self._vocab_size, head.weight.shape[0]), dtype=torch.bool)
        table[[i for i in self.stops if i < len(table)]] = True
        return table.to(device)


def build(
    config: RolloutConfig,
    language_model: LanguageModel,
    *,
    seed: int,
    run_dir: Path,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    own_copy: bool = False,
) -> HFSampler:
    """Build the sampler of a run.

    Args:
        config: `batch_size` is read.
        language_model: The model in training.
        seed: Of the noise.
        run_dir: The run's folder; nothing is written.
        autocast: Makes the context that the model runs in.
        own_copy: See `HFSampler`.
    """
    return HFSampler(language_model, seed=seed, batch_size=config.batch_size, autocast=autocast, own_copy=own_copy)
