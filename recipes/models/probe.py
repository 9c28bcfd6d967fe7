"""Try a model on a few made-up tokens: does what its class and configuration promise hold?

A model that hides something from the rules of `recipes.models.backends` (recurrence in a class of its own, a mask made
without positions) gives itself away here: one document is changed, and the logits of the other are looked at.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.schema import Backend, Layout, PositionAxes, Scope
from datum import Datum, collate_datums
from recipes.models.errors import ModelError
from recipes.models.inputs import model_inputs

__all__ = ["find_leak", "find_unused_parts", "probe_context", "probe_ids"]

_FIRST, _SECOND = 9, 13  # tokens of the two documents


def probe_ids(model: PreTrainedModel, *lengths: int, seed: int = 0) -> list[list[int]]:
    """Made-up documents of the given lengths, from the lower half of the vocabulary, where text tokens are."""
    generator = torch.Generator().manual_seed(seed)
    rows: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[index, assignment]
    high = max(2, rows // 2)
    return [torch.randint(0, high, (length,), generator=generator).tolist() for length in lengths]


def probe_context(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Autocast where a kernel takes half precision alone and the parameters are float32."""
    if model.config._attn_implementation == Backend.flash_attention_2.value and model.dtype == torch.float32:
        return torch.autocast(model.device.type, torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def find_leak(
    model: PreTrainedModel, *, backend: Backend, layout: Layout, scope: Scope, axes: PositionAxes
) -> str | None:
    """Look for documents that see each other, or see what comes later, with the backend that is set.

    Args:
        model: In any mode, which is kept.
        backend: The backend that is set.
        layout: Layout to try.
        scope: With xdoc, the joined row has to equal one plain sequence instead.
        axes: Rotary axes to feed.

    Returns:
        What is wrong, or None.
    """
    exact = model.dtype == torch.float32 and backend != Backend.flash_attention_2
    rounding, close = (1e-5, 1e-3) if exact else (2e-2, 1e-1)
    first, second, other, longer = probe_ids(model, _FIRST, _SECOND, _FIRST, _SECOND + 5)
    later = [*second[:-1], first[0] if first[0] != second[-1] else first[0] + 1]
    padded = layout == Layout.padded

    def logits(*documents: Sequence[int]) -> Tensor:
        batch = collate_datums([Datum(list(ids)) for ids in documents], packed=not padded, pad_seq_len_divisible=4)
        batch = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with probe_context(model):
            output = model(**model_inputs(batch, backend=backend, scope=scope, axes=axes)).logits.float()
        last = len(documents[-1])
        start = 0 if padded else sum(map(len, documents)) - last
        return output[-1, start : start + last]

    was_training = model.training
    model.eval()
    try:
        if scope == Scope.xdoc and not padded:
            if _moved(logits(first, second), logits([*first, *second])[_FIRST:]) > close:
                return "joined documents differ from one plain sequence"
            return None
        together = logits(first, second)
        if _moved(together, logits(longer if padded else other, second)) > rounding:
            return "padding changes a row's logits" if padded else "documents of one packed row see each other"
        if _moved(together[:-1], logits(first, later)[:-1]) > rounding:
            return "tokens see what comes after them: this is not a causal language model"
        if _moved(together, logits(second)) > close:
            return "a document beside another differs from the same document alone"
    except ModelError as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        model.train(was_training)
    return None


@torch.no_grad()
def find_unused_parts(model: PreTrainedModel) -> list[str]:
    """Names of the parts of a multimodal model that text alone does not run through; none for a model of text."""
    if model.config.get_text_config() is model.config:
        return []
    parts = {name: part for name, part in model.named_modules() if name and part in set(model.base_model.children())}
    used: set[str] = set()
    handles = [part.register_forward_pre_hook(lambda *_, name=name: used.add(name)) for name, part in parts.items()]
    try:
        with probe_context(model):
            model(input_ids=torch.tensor(probe_ids(model, _FIRST), device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, part in parts.items() if name not in used and any(True for _ in part.parameters())]


def _moved(logits: Tensor, again: Tensor) -> float:
    """How far logits moved, in units of their size: that of the median token, since one may go to another expert."""
    if not bool(torch.isfinite(logits).all() and torch.isfinite(again).all()):
        return float("inf")
    size = logits.abs().max().clamp_min(1e-30)
    return float((logits - again).abs().amax(-1).median() / size)
