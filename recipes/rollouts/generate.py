"""The decode loop: from prompts and uniform numbers to sampled ids and their log-probabilities.

    logits of the prompts, each different one read once  ->  a row for each completion
    token = first id whose cumulative probability exceeds the row's uniform number
    rows that ended leave the batch when half of them have

The loop knows nothing of requests. Every random number comes in from outside, so a row's tokens are a function of its
prompt, its numbers and the weights; other rows change them by rounding alone.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from conf.schema import PositionAxes
from recipes.models.probe import probe_context, probe_ids
from recipes.models.scoring import base_of
from recipes.models.traits import read_traits
from recipes.rollouts.sampler import Sampling

__all__ = ["Decoding", "Drawn", "draw", "evaluating", "generate", "read_decoding"]

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_CHUNK = 1 << 24  # logits whose distribution is formed at one time


@dataclass(frozen=True)
class Decoding:
    """How a model may be run token by token.

    Attributes:
        has_cache: A cache gives what reading the whole prefix gives; else prefixes are read again for every token.
        has_padding: Prompts of different lengths may share a batch, padded on the left.
        takes_positions: The forward has `position_ids`.
        takes_last: The forward has `logits_to_keep`.
        cache_name: Argument of the forward that takes the cache.
        num_axes: Axes of `position_ids` before [B, S]; 0 for plain ones.
        reason: Why there is no cache or no padding; empty with both.
    """

    has_cache: bool
    has_padding: bool
    takes_positions: bool
    takes_last: bool
    cache_name: str
    num_axes: int = 0
    reason: str = ""


@dataclass
class Drawn:
    """What `generate` drew.

    Attributes:
        ids: [rows, longest limit] int64; a row is meaningful up to its length.
        logprobs: The same, float32.
        lengths: [rows] int64, the stop id included.
        is_finished: [rows] bool, whether the last of them is a stop id.
    """

    ids: Tensor
    logprobs: Tensor
    lengths: Tensor
    is_finished: Tensor


@contextmanager
def evaluating(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Evaluation mode, and layers as if never compiled, since every length would compile them anew.

    Modules get back the mode that each was in.
    """
    modules = list(model.modules())
    was_training = [module for module in modules if module.training]
    is_compiled = any(module._compiled_call_impl is not None for module in modules)
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            yield
    finally:
        for module in was_training:
            module.training = True


@torch.no_grad()
def read_decoding(model: PreTrainedModel | PeftModel, axes: PositionAxes = PositionAxes.rope) -> Decoding:
    """Find out how a model may be decoded, by comparing a cached step with the whole prefix on made-up tokens.

    Args:
        model: In any mode, which is kept.
        axes: Rotary axes to feed.
    """
    base = base_of(model)
    parameters = inspect.signature(base.forward).parameters
    options: dict[str, Any] = {
        "takes_positions": "position_ids" in parameters,
        "takes_last": "logits_to_keep" in parameters,
        "cache_name": next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[0]),
        "num_axes": 4 if axes == PositionAxes.mrope else 0,
    }
    traits = read_traits(base)
    tolerance = 1e-3 if base.dtype == torch.float32 else 1e-1
    long, short = probe_ids(base, 7, 4)
    with evaluating(model), probe_context(base):
        whole = [_WholePrefix(model, Decoding(False, False, **options)).start([ids])[0] for ids in (long, short)]
        reason = ""
        for has_padding in (True, False):
            decoding = Decoding(True, has_padding, **options, reason=reason)
            if has_padding and not decoding.takes_positions:
                reason = f"{traits.name} takes no position_ids"
                continue
            if has_padding and (traits.recurrent or traits.has_mrope):
                reason = traits.recurrent or "rotary embeddings with several axes"
                continue
            try:
                prompts = [long[:-1], short[:-1]] if has_padding else [long[:-1]]
                prefix = _CachedPrefix(model, decoding, room=1)
                prefix.start(prompts)
                rows = [1, 0, 1] if has_padding else [0, 0]
                prefix.select(torch.tensor(rows, device=base.device))
                last = torch.tensor([(long, short)[row][-1] for row in rows], device=base.device)
                got = prefix.extend(last).float()
                wanted = torch.stack([whole[row] for row in rows]).float()
                if (got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1e-30):
                    return decoding
                problem = "a cached step differs from reading the whole prefix"
            except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, IndexError) as error:
                problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            reason = f"{traits.name} with {'left padding' if has_padding else 'a cache'}: {problem}"
    return Decoding(False, False, **options, reason=reason)


@torch.no_grad()
def generate(
    model: PreTrainedModel | PeftModel,
    decoding: Decoding,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Tensor,
    uniforms: Tensor,
    limits: Tensor,
    stops: Tensor,
    sampling: Sampling,
) -> Drawn:
    """Sample a completion for every row; tensors are on the model's device.

    Args:
        model: In evaluation mode.
        decoding: What `read_decoding` said; without `has_padding` prompts have one length.
        prompts: Different prompts, none empty.
        prompt_of_row: [rows] int64.
        uniforms: [rows, longest limit] float64.
        limits: [rows] int64, most tokens of each row, at least 1.
        stops: [ids] bool, which ids end a row.
        sampling: The distribution to draw from.
    """
    rows, width = uniforms.shape
    device = uniforms.device
    result = Drawn(
        ids=torch.zeros((rows, width), dtype=torch.int64, device=device),
        logprobs=torch.zeros((rows, width), dtype=torch.float32, device=device),
        lengths=limits.clone(),
        is_finished=torch.zeros(rows, dtype=torch.bool, device=device),
    )
    prefix: _Prefix = (_CachedPrefix if decoding.has_cache else _WholePrefix)(model, decoding, width)
    logits = prefix.start(prompts).index_select(0, prompt_of_row)
    prefix.select(prompt_of_row)
    alive = torch.arange(rows, device=device)  # rows still in the batch
    open_rows = torch.ones(rows, dtype=torch.bool, device=device)  # of these, which have not ended
    for step in range(width):
        ids, logprobs = draw(logits, uniforms[:, step], sampling)
        result.ids[alive, step] = ids
        result.logprobs[alive, step] = logprobs
        stopped = open_rows & stops[ids]
        result.is_finished[alive] |= stopped
        result.lengths[alive] = torch.where(stopped, step + 1, result.lengths[alive])
        open_rows = open_rows & ~stopped & (limits > step + 1)
        num_open = int(open_rows.sum())
        if num_open == 0:
            break
        if 2 * num_open <= len(alive):
            kept = open_rows.nonzero().squeeze(1)
            alive, ids, limits, uniforms, open_rows = (t[kept] for t in (alive, ids, limits, uniforms, open_rows))
            prefix.select(kept)
        logits = prefix.extend(ids)
    return result


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one id a row by inverting the cumulative distribution, in float64 where the device has it.

    [0.5, 0.0, 0.5] with 0.49, 0.5 and 0.99 -> ids 0, 2 and 2; an id of probability 0 is never drawn.

    Args:
        logits: [N, V].
        uniforms: [N] in [0, 1).
        sampling: The distribution to draw from.

    Returns:
        Ids [N] int64 and their log-probabilities [N] float32 under that distribution.
    """
    chunk = max(1, _CHUNK // logits.shape[1])
    if len(logits) > chunk:
        pieces = zip(logits.split(chunk), uniforms.split(chunk))
        ids, logprobs = zip(*(draw(*piece, sampling) for piece in pieces))
        return torch.cat(ids), torch.cat(logprobs)
    scaled = logits.float() / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        chosen = scaled.argmax(-1, keepdim=True)
        log_p = torch.log_softmax(scaled, -1)
    else:
        if sampling.logprob_kind == "renormalised":
            scaled = _cut(scaled, sampling)
        log_p = torch.log_softmax(scaled, -1)
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        cumulative = log_p.exp().cumsum(-1, dtype=wide)
        total = cumulative[:, -1:]
        # u * total may round up to the total, beyond which there is no id.
        below = torch.minimum(uniforms[:, None].to(wide) * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, below, right=True).clamp_max(logits.shape[1] - 1)  # V where all is NaN
    return chosen.squeeze(1), log_p.gather(1, chosen).squeeze(1)


def _cut(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Leave the top-k and then the top-p of each row; the rest is -inf. Of equal logits the lower id goes first."""
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scaled.shape[1]:
        ordered[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        p = torch.softmax(ordered, -1)
        ordered[(p.cumsum(-1) - p >= sampling.top_p) & (torch.arange(p.shape[1], device=p.device) > 0)] = -torch.inf
    return torch.empty_like(scaled).scatter_(1, ids, ordered)


class _Prefix(Protocol):
    """What the model has read so far, row by row."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts, a row for each; returns the logits of what comes next, [rows, V]."""
        ...

    def select(self, rows: Tensor) -> None:
        """Make the given rows, in the given order and as often as given, the rows."""
        ...

    def extend(self, ids: Tensor) -> Tensor:
        """Append an id to each row; returns the logits of what comes next, [rows, V]."""
        ...


class _RoomyLayer(DynamicLayer):
    """Keys and values in front of free room, so that a token does not copy all before it.

    Args:
        room: Tokens to make room for when rows are chosen.
    """

    def __init__(self, room: int):
        super().__init__()
        self.room = room
        self.buffers: tuple[Tensor, ...] | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, and move them to where there is room behind them."""
        if self.keys is None or self.values is None:
            return
        rows, capacity = len(beam_idx), self.keys.shape[2] + self.room
        old = (self.keys, self.values)
        self.buffers = tuple(t.new_empty((rows, t.shape[1], capacity, t.shape[3])) for t in old)
        self.keys, self.values = (
            _fill(buffer, 0, tensor.index_select(0, beam_idx)) for buffer, tensor in zip(self.buffers, old)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, [rows, heads, new, head_dim]; returns all."""
        length = self.get_seq_length()
        if self.buffers is None or length + key_states.shape[2] > self.buffers[0].shape[2]:
            self.buffers = None
            return super().update(key_states, value_states, *args, **kwargs)
        self.room -= key_states.shape[2]
        keys, values = (_fill(buffer, length, new) for buffer, new in zip(self.buffers, (key_states, value_states)))
        self.keys, self.values = keys, values
        return keys, values


def _fill(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    end = start + new.shape[2]
    buffer[:, :, start:end] = new
    return buffer[:, :, :end]


class _CachedPrefix:
    """Keys and values (or states) in a cache; left padding is hidden by an explicit mask."""

    def __init__(self, model: PreTrainedModel | PeftModel, decoding: Decoding, room: int):
        self.model, self.decoding, self.device = model, decoding, base_of(model).device
        self.cache = DynamicCache(config=base_of(model).config)
        self.cache.layers = [_RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in self.cache.layers]
        self.mask: Tensor | None = None  # [rows, width] of 1 and 0; None without padding
        self.next: Tensor  # [rows], position of the next token

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = self.device
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        self.next = torch.tensor(lengths, device=device)
        positions = torch.arange(width, device=device) - (width - self.next)[:, None]
        if min(lengths) < width:
            self.mask = (positions >= 0).long()
        return self._forward(ids, positions.clamp_min(0))

    def select(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
        self.next = self.next[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def extend(self, ids: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], 1)
        positions = self.next[:, None]
        self.next = self.next + 1
        return self._forward(ids[:, None], positions)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": self.mask}
        inputs |= {self.decoding.cache_name: self.cache, "use_cache": True}
        return _last_logits(self.model, self.decoding, inputs, positions)


class _WholePrefix:
    """Ids alone, of one length in all rows; the model reads all of them for every token."""

    def __init__(self, model: PreTrainedModel | PeftModel, decoding: Decoding, room: int = 0):
        self.model, self.decoding, self.device = model, decoding, base_of(model).device
        self.ids: Tensor  # [rows, width]

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        return self._forward()

    def select(self, rows: Tensor) -> None:
        self.ids = self.ids[rows]

    def extend(self, ids: Tensor) -> Tensor:
        self.ids = torch.cat([self.ids, ids[:, None]], 1)
        return self._forward()

    def _forward(self) -> Tensor:
        inputs = {"input_ids": self.ids, "use_cache": False}
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        return _last_logits(self.model, self.decoding, inputs, positions)


def _last_logits(
    model: PreTrainedModel | PeftModel, decoding: Decoding, inputs: dict[str, Any], positions: Tensor
) -> Tensor:
    """Logits of the last position, [rows, V]."""
    if decoding.takes_positions:
        axes = decoding.num_axes
        inputs["position_ids"] = positions.expand(axes, *positions.shape) if axes else positions
    if decoding.takes_last:
        inputs["logits_to_keep"] = 1
    logits: Tensor = model(**inputs).logits
    return logits[:, -1]
