"""The two autograd functions behind `recipes.losses.logprobs`: a head's log-probabilities, a chunk of rows at a time.

With x the logits of a row, l = log_softmax(x), p = exp(l) and H = -sum(p * l), the gradients of the two results are

    d l[t] / d x[j] = [j = t] - p[j]          d H / d x[j] = -p[j] * (l[j] + H)

Matrix products run in the dtype of the operands; whatever else touches logits runs in the statistics dtype.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Head", "LinearScores", "RecomputedScores"]

Needed = tuple[bool, bool, bool]  # which of hidden, weight and bias need a gradient


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states, tensors apart."""

    compute_dtype: torch.dtype  # of the matrix products
    temperature: float
    softcap: float | None
    logit_scale: float
    chunk_size: int

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Dtype of the softmax, of the results and of sums over chunks."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def slope(self) -> float:
        """Derivative of a logit by the head's plain output; with soft-capping, its value at 0."""
        return self.logit_scale / self.temperature


class RecomputedScores(torch.autograd.Function):
    """Log-probabilities, whether they are the row's largest, entropy or None: each [N], first and last differentiable.

    Backward forms the logits again. Where only `hidden` needs a gradient it does not have to: the gradient of a row's
    log-probability by its own hidden state, [N, H] in all, is formed in the forward pass and scaled in backward.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        entropy: bool,
        needed: Needed,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        by_row = None
        with _no_autocast(hidden):
            chunks = _Chunks(hidden, weight, bias, head, gradient=needed == (True, False, False))
            if needed == (True, False, False):
                gradients = _Gradients(chunks, needed)
                slopes = torch.full(targets.shape, head.slope, dtype=head.statistics_dtype, device=hidden.device)
                logprobs, is_argmax, entropies = _score(
                    chunks, targets, entropy, _adder(gradients, chunks, targets, slopes)
                )
                by_row = gradients.hidden
            else:
                logprobs, is_argmax, entropies = _score(chunks, targets, entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, by_row)
        ctx.head = head
        ctx.mark_non_differentiable(is_argmax)
        ctx.set_materialize_grads(False)
        return logprobs, is_argmax, entropies

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, by_logprobs: Tensor | None, _: None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        hidden, weight, bias, targets, entropies, by_row = ctx.saved_tensors
        if by_row is not None and by_logprobs is not None and by_entropy is None:
            return (by_row * by_logprobs[:, None]).to(hidden.dtype), *(None,) * 6
        with _no_autocast(hidden):
            chunks = _Chunks(hidden, weight, bias, ctx.head, gradient=True)
            gradients = _Gradients(chunks, ctx.needs_input_grad[:3])
            scales = torch.zeros_like(targets, dtype=ctx.head.statistics_dtype)
            if by_logprobs is not None:
                scales = by_logprobs * ctx.head.slope
            add = _adder(gradients, chunks, targets, scales)
            for here, logits in chunks:
                log_p = torch.log_softmax(logits, -1, out=logits)
                if by_entropy is None:
                    add(here, log_p)
                    continue
                p = torch.exp(log_p, out=chunks.spare(here))
                by_logits = log_p.add_(entropies[here, None]).mul_(by_entropy[here, None] * -ctx.head.slope)
                by_logits.sub_(scales[here, None]).mul_(p).scatter_add_(1, targets[here, None], scales[here, None])
                gradients.add(chunks, here, by_logits)
        return *gradients.cast(hidden.dtype, weight.dtype, None if bias is None else bias.dtype), *(None,) * 4


class LinearScores(torch.autograd.Function):
    """The weighted sum of log-probabilities, which has the gradient, and `RecomputedScores`' results, which have none.

    The gradient is formed in the forward pass and multiplied, in place, by backward's incoming scalar.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        entropy: bool,
        needed: Needed,
        coefficients: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        with _no_autocast(hidden):
            chunks = _Chunks(hidden, weight, bias, head, gradient=any(needed))
            if any(needed):
                gradients = _Gradients(chunks, needed)
                scales = coefficients.to(head.statistics_dtype) * head.slope
                logprobs, is_argmax, entropies = _score(
                    chunks, targets, entropy, _adder(gradients, chunks, targets, scales)
                )
                ctx.gradients = gradients.finish()
                ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
            else:
                logprobs, is_argmax, entropies = _score(chunks, targets, entropy)
            wide = torch.float32 if hidden.device.type == "mps" else torch.float64
            weighted_sum = (coefficients.to(wide) * logprobs.to(wide)).sum()
        ctx.mark_non_differentiable(logprobs, is_argmax, *([] if entropies is None else [entropies]))
        return weighted_sum, logprobs, is_argmax, entropies

    @staticmethod
    def backward(ctx: Any, by_sum: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        _refuse_create_graph()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "score_targets: second backward through weighted_sum, whose gradient is formed once, in the forward "
                "pass. Call score_targets again, or leave out coefficients and sum the logprobs yourself"
            )
        gradients.scale(by_sum)
        return *gradients.cast(*ctx.dtypes), *(None,) * 5


class _Chunks:
    """The chunks of one pass over the rows, and the buffers that they share."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, *, gradient: bool) -> None:
        self.head = head
        self.hidden = hidden.to(head.compute_dtype)
        self.weight = weight.to(head.compute_dtype)
        self.bias = None if bias is None else bias.to(head.compute_dtype)
        rows = len(hidden)
        count = -(-rows // head.chunk_size)
        self.size = -(-rows // max(count, 1))  # 257 rows in chunks of at most 256 -> 129 + 128
        self.logits = self._buffer(head.statistics_dtype)
        self.is_mixed = head.compute_dtype != head.statistics_dtype
        self.product = self._buffer(head.compute_dtype) if self.is_mixed else self.logits
        self.curvature = self._buffer(head.statistics_dtype) if gradient and head.softcap is not None else None
        self._spare: Tensor | None = None

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.size, len(self.weight), dtype=dtype, device=self.weight.device)

    def spare(self, here: slice) -> Tensor:
        """Return a second buffer like the logits'."""
        if self._spare is None:
            self._spare = self._buffer(self.head.statistics_dtype)
        return self._spare[: here.stop - here.start]

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk's rows and their logits; the caller may overwrite these."""
        head, rows = self.head, len(self.hidden)
        factor = head.slope if head.softcap is None else head.logit_scale / head.softcap
        for start in range(0, rows, max(self.size, 1)):
            here = slice(start, min(start + self.size, rows))
            logits, product = self.logits[: here.stop - start], self.product[: here.stop - start]
            added = product if self.bias is None else self.bias
            beta = 0.0 if self.bias is None else factor
            torch.addmm(added, self.hidden[here], self.weight.t(), beta=beta, alpha=factor, out=product)
            if self.is_mixed:
                logits.copy_(product)
            if head.softcap is not None:
                logits.tanh_()
                if self.curvature is not None:
                    torch.mul(logits, logits, out=self.curvature[: here.stop - start]).neg_().add_(1)
                logits.mul_(head.softcap / head.temperature)
            yield here, logits


class _Gradients:
    """Gradients of hidden states, weight and bias; None where one is not needed."""

    def __init__(self, chunks: _Chunks, needed: Needed) -> None:
        weight, self._dtype = chunks.weight, chunks.head.statistics_dtype
        fresh = torch.empty if len(chunks.hidden) else torch.zeros  # without rows no chunk will write to them
        self.hidden = torch.empty(chunks.hidden.shape, dtype=weight.dtype, device=weight.device) if needed[0] else None
        self.weight = fresh(weight.shape, dtype=self._dtype, device=weight.device) if needed[1] else None
        self.bias = torch.zeros(len(weight), dtype=self._dtype, device=weight.device) if needed[2] else None
        self._addend = torch.empty_like(weight) if needed[1] and chunks.is_mixed else None

    def add(self, chunks: _Chunks, here: slice, by_logits: Tensor) -> None:
        """Add a chunk's part. `by_logits` is the head's slope times the gradient by the logits; it is overwritten."""
        if chunks.curvature is not None:
            by_logits.mul_(chunks.curvature[: len(by_logits)])
        if self.bias is not None:
            self.bias += by_logits.sum(0)
        if chunks.is_mixed:
            by_logits = chunks.product[: len(by_logits)].copy_(by_logits)
        if self.hidden is not None:
            torch.mm(by_logits, chunks.weight, out=self.hidden[here])
        if self.weight is None:
            return
        if self._addend is None:
            beta = float(here.start > 0)
            torch.addmm(self.weight, by_logits.t(), chunks.hidden[here], beta=beta, out=self.weight)
            return
        torch.mm(by_logits.t(), chunks.hidden[here], out=self._addend)
        if here.start:
            self.weight += self._addend
        else:
            self.weight.copy_(self._addend)

    def finish(self) -> "_Gradients":
        """Let go of what only `add` needs."""
        self._addend = None
        return self

    def scale(self, factor: Tensor) -> None:
        """Multiply by a scalar, in place where the dtype is wide enough not to round it."""
        if self.hidden is not None:
            self.hidden = self.hidden.to(self._dtype).mul_(factor)
        for gradient in (self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)

    def cast(
        self, hidden: torch.dtype, weight: torch.dtype, bias: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients in the dtypes of their tensors."""
        return (
            None if self.hidden is None else self.hidden.to(hidden),
            None if self.weight is None else self.weight.to(weight),
            None if self.bias is None else self.bias.to(bias),
        )


def _score(
    chunks: _Chunks, targets: Tensor, entropy: bool, visit: Callable[[slice, Tensor], None] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities, whether they are the largest, and entropy.

    `visit` gets each chunk's rows and the log-probabilities of the whole vocabulary, which it may overwrite.
    """
    logprobs = torch.empty(targets.shape, dtype=chunks.head.statistics_dtype, device=targets.device)
    is_argmax = torch.empty_like(logprobs, dtype=torch.bool)
    entropies = torch.empty_like(logprobs) if entropy else None
    for here, logits in chunks:
        log_p = torch.log_softmax(logits, -1, out=logits)  # in place: one pass, each row in cache
        logprobs[here] = log_p.gather(1, targets[here, None]).squeeze(1)
        is_argmax[here] = logprobs[here] == log_p.amax(-1)
        if entropies is not None:
            entropies[here] = torch.exp(log_p, out=chunks.spare(here)).mul_(log_p).sum(-1).neg_()
        if visit is not None:
            visit(here, log_p)
    return logprobs, is_argmax, entropies


def _adder(gradients: _Gradients, chunks: _Chunks, targets: Tensor, scales: Tensor) -> Callable[[slice, Tensor], None]:
    """Return what adds the gradient of sum(scales / slope * logprobs), given a chunk's rows and log-probabilities."""

    def add(here: slice, log_p: Tensor) -> None:
        scale = scales[here, None]
        gradients.add(chunks, here, log_p.exp_().mul_(-scale).scatter_add_(1, targets[here, None], scale))

    return add


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "score_targets: backward with create_graph=True, but its gradients have no gradient; use "
            "recipes.losses.logprobs_reference.score_targets_reference"
        )


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
