"""The two autograd functions behind `recipes.losses.logprobs`: a head's log-probabilities, a chunk of rows at a time.

With x the logits of a row, p = softmax(x), l = log p and H = -sum(p * l), the gradients of the two results are

    d l[t] / d x[j] = [j = t] - p[j]          d H / d x[j] = -p[j] * (l[j] + H)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Head", "LinearScores", "RecomputedScores"]


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states, apart from the tensors."""

    compute_dtype: torch.dtype  # of the matrix products
    temperature: float
    softcap: float | None
    logit_scale: float
    chunk_size: int

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Dtype of the softmax and of the results."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def slope(self) -> float:
        """Derivative of a logit by the head's output (at 0 where the head is soft-capped)."""
        return self.logit_scale / self.temperature


class _Chunks:
    """The chunks of one pass over the rows, and the buffers that they share."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, *, gradient: bool) -> None:
        self.head = head
        self.hidden = hidden.to(head.compute_dtype)
        self.weight = weight.to(head.compute_dtype)
        self.bias = None if bias is None else bias.to(head.compute_dtype)
        rows = hidden.shape[0]
        count = -(-rows // head.chunk_size)
        self.size = -(-rows // max(count, 1))  # 257 rows in chunks of 256 -> 129 + 128
        self.logits = self._buffer(head.statistics_dtype)
        low = head.compute_dtype != head.statistics_dtype
        self.product = self._buffer(head.compute_dtype) if low else self.logits
        self.curvature = self._buffer(head.statistics_dtype) if gradient and head.softcap is not None else None

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.size, self.weight.shape[0], dtype=dtype, device=self.weight.device)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each chunk and their logits, in a buffer that the caller may overwrite."""
        head = self.head
        rows = self.hidden.shape[0]
        factor = head.slope if head.softcap is None else head.logit_scale / head.softcap
        for start in range(0, rows, max(self.size, 1)):
            here = slice(start, min(start + self.size, rows))
            count = here.stop - here.start
            logits, product = self.logits[:count], self.product[:count]
            if self.bias is None:
                torch.addmm(product, self.hidden[here], self.weight.t(), beta=0, alpha=factor, out=product)
            else:
                torch.addmm(self.bias, self.hidden[here], self.weight.t(), beta=factor, alpha=factor, out=product)
            if product is not logits:
                logits.copy_(product)
            if head.softcap is not None:
                logits.tanh_()
                if self.curvature is not None:
                    torch.mul(logits, logits, out=self.curvature[:count]).neg_().add_(1)
                logits.mul_(head.softcap / head.temperature)
            yield here, logits


class _Gradients:
    """Adds up the gradients of hidden states, weight and bias over chunks; None where one is not needed."""

    def __init__(self, chunks: _Chunks, needed: tuple[bool, bool, bool]) -> None:
        self.chunks = chunks
        weight, statistics = chunks.weight, chunks.head.statistics_dtype
        self.hidden = torch.empty_like(chunks.hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=statistics) if needed[1] else None
        self.bias = torch.zeros(weight.shape[0], dtype=statistics, device=weight.device) if needed[2] else None
        low = weight.dtype != statistics
        self.addend = torch.empty_like(weight) if low and needed[1] else None

    def add(self, here: slice, by_logits: Tensor) -> None:
        """Add a chunk's gradient by its logits; `by_logits` is overwritten."""
        chunks = self.chunks
        if chunks.curvature is not None:
            by_logits.mul_(chunks.curvature[: by_logits.shape[0]])
        if self.bias is not None:
            self.bias += by_logits.sum(0)
        product = chunks.product[: by_logits.shape[0]]
        if product.dtype != by_logits.dtype:
            by_logits = product.copy_(by_logits)
        if self.hidden is not None:
            torch.mm(by_logits, chunks.weight, out=self.hidden[here])
        if self.weight is None:
            return
        if self.addend is None:
            self.weight.addmm_(by_logits.t(), chunks.hidden[here])
        else:
            self.weight += torch.mm(by_logits.t(), chunks.hidden[here], out=self.addend)


def _without_autocast(device_type: str) -> torch.autocast:
    return torch.autocast(device_type, enabled=False)


class RecomputedScores(torch.autograd.Function):
    """(hidden, weight, bias, targets, head, entropy) -> (logprobs [N], entropy [N] or None), both differentiable."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        with _without_autocast(hidden.device.type):
            logprobs = torch.empty(targets.shape, dtype=head.statistics_dtype, device=hidden.device)
            entropies = torch.empty_like(logprobs) if entropy else None
            for here, logits in _Chunks(hidden, weight, bias, head, gradient=False):
                log_p = torch.log_softmax(logits, -1, out=logits)
                logprobs[here] = log_p.gather(1, targets[here, None]).squeeze(1)
                if entropies is not None:
                    entropies[here] = -(log_p.exp().mul_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        with _without_autocast(hidden.device.type):
            chunks = _Chunks(hidden, weight, bias, ctx.head, gradient=True)
            gradients = _Gradients(chunks, ctx.needs_input_grad[:3])
            slope = ctx.head.slope
            for here, logits in chunks:
                if by_entropy is None:
                    assert by_logprobs is not None
                    scale = by_logprobs[here, None] * slope
                    by_logits = torch.softmax(logits, -1, out=logits).mul_(-scale)
                else:
                    log_p = torch.log_softmax(logits, -1, out=logits)
                    p = log_p.exp()
                    by_logits = log_p.add_(entropies[here, None]).mul_(-by_entropy[here, None] * slope)
                    if by_logprobs is not None:
                        scale = by_logprobs[here, None] * slope
                        by_logits.sub_(scale)
                    by_logits.mul_(p)
                if by_logprobs is not None:
                    by_logits.scatter_add_(1, targets[here, None], scale)
                gradients.add(here, by_logits)
        return _cast(gradients, hidden, weight, bias) + (None, None, None)


class LinearScores(torch.autograd.Function):
    """Like `RecomputedScores`, with coefficients; the first result is the weighted sum, which alone has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        coefficients: Tensor,
        head: Head,
        entropy: bool,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        needed = tuple(needs and grad_enabled for needs in ctx.needs_input_grad[:3])
        with _without_autocast(hidden.device.type):
            logprobs = torch.empty(targets.shape, dtype=head.statistics_dtype, device=hidden.device)
            entropies = torch.empty_like(logprobs) if entropy else None
            chunks = _Chunks(hidden, weight, bias, head, gradient=any(needed))
            gradients = _Gradients(chunks, needed) if any(needed) else None
            scales = coefficients.to(head.statistics_dtype) * head.slope
            for here, logits in chunks:
                log_p = torch.log_softmax(logits, -1, out=logits)
                logprobs[here] = log_p.gather(1, targets[here, None]).squeeze(1)
                if entropies is not None:
                    entropies[here] = -(log_p.exp().mul_(log_p)).sum(-1)
                if gradients is not None:
                    scale = scales[here, None]
                    by_logits = log_p.exp_().mul_(-scale).scatter_add_(1, targets[here, None], scale)
                    gradients.add(here, by_logits)
            wide = torch.float32 if hidden.device.type == "mps" else torch.float64
            weighted_sum = (coefficients.to(wide) * logprobs.to(wide)).sum()
        if gradients is not None:
            ctx.save_for_backward(hidden, weight, bias)
            ctx.gradients = gradients
        ctx.mark_non_differentiable(logprobs, *([] if entropies is None else [entropies]))
        return weighted_sum, logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sum: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "score_targets: a second backward through weighted_sum; its gradient is formed once, in the forward pass. "
                "Call score_targets again, or leave coefficients out"
            )
        for gradient in (gradients.hidden, gradients.weight, gradients.bias):
            if gradient is not None:
                gradient.mul_(by_sum.to(gradient.dtype))
        return _cast(gradients, hidden, weight, bias) + (None, None, None, None, None)


def _cast(
    gradients: _Gradients, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (
        None if gradients.hidden is None else gradients.hidden.to(hidden.dtype),
        None if gradients.weight is None else gradients.weight.to(weight.dtype),
        None if gradients.bias is None or bias is None else gradients.bias.to(bias.dtype),
    )
