"""Which attention backend is sound for which model, layout and device, and the choice of `auto`.

Sound: changing one document leaves the logits of all others and the gradients of their losses bit-equal (models with
experts: within rounding), and a packed document equals the same document alone. `RULES` are the exceptions;
docs/models.md shows them as a table. What the rules allow, `recipes.models.probe` tries on the model itself.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from conf.schema import Backend, Layout
from recipes.models.errors import ModelError
from recipes.models.traits import Traits

__all__ = ["AUTO_ORDER", "RULES", "Rule", "candidates", "refuse", "unsound"]

AUTO_ORDER = (Backend.document_sdpa, Backend.sdpa, Backend.eager)
"""What `auto` tries, fastest first. The two that need CUDA are used only where they are asked for by name."""

_EVERY = frozenset(Backend) - {Backend.auto}


@dataclass(frozen=True)
class Rule:
    """Where some backends are not sound.

    Attributes:
        backends: Backends that the rule is about.
        applies: From (traits, layout, device type) to whether they are unsound there.
        reason: Why, and what to use instead, for the error message and for docs/models.md.
    """

    backends: frozenset[Backend]
    applies: Callable[[Traits, Layout, str], bool]
    reason: str


RULES = (
    Rule(
        _EVERY,
        lambda traits, layout, device: traits.recurrent is not None and layout == Layout.packed,
        "recurrent and convolution layers carry state from one document into the next; use collate=padded",
    ),
    Rule(
        _EVERY,
        lambda traits, layout, device: bool(traits.other_layers) and layout == Layout.packed,
        "it is not known how layers of this type keep documents apart; use collate=padded",
    ),
    Rule(
        frozenset({Backend.document_sdpa, Backend.sdpa}),
        lambda traits, layout, device: traits.has_softcap,
        "it cannot soft-cap attention scores; use attention.backend=eager",
    ),
    Rule(
        frozenset({Backend.document_sdpa, Backend.sdpa, Backend.flash_attention_2}),
        lambda traits, layout, device: traits.has_sinks,
        "it has no attention sinks; use attention.backend=eager",
    ),
    Rule(
        frozenset({Backend.document_sdpa, Backend.flash_attention_2}),
        lambda traits, layout, device: traits.has_chunks,
        "it has no chunked attention; use attention.backend=sdpa",
    ),
    Rule(
        frozenset({Backend.flash_attention_2}),
        lambda traits, layout, device: traits.has_windows and not traits.passes_windows,
        "this model's layers do not tell it their sliding window; use attention.backend=document_sdpa",
    ),
    Rule(
        frozenset({Backend.flex_attention, Backend.flash_attention_2}),
        lambda traits, layout, device: device != "cuda",
        "it trains on CUDA alone; use attention.backend=document_sdpa",
    ),
    Rule(
        frozenset({Backend.flash_attention_2}),
        lambda traits, layout, device: importlib.util.find_spec("flash_attn") is None,
        "it needs a package: pip install flash-attn --no-build-isolation",
    ),
)


def unsound(backend: Backend, traits: Traits, layout: Layout, device_type: str) -> str | None:
    """Why a backend must not be used, or None where the rules allow it."""
    for rule in RULES:
        if backend in rule.backends and rule.applies(traits, layout, device_type):
            return rule.reason
    if backend not in traits.supported:
        names = ", ".join(sorted(b.value for b in traits.supported))
        return f"{traits.name} does not implement it; it has {names or 'its own attention alone'}"
    return None


def candidates(
    requested: Backend, traits: Traits, layout: Layout, device_type: str
) -> tuple[list[Backend], dict[Backend, str]]:
    """Return the backends to try, best first, and why the others are out.

    Raises:
        ModelError: None is left.
    """
    wanted = AUTO_ORDER if requested == Backend.auto else (requested,)
    reasons = {backend: unsound(backend, traits, layout, device_type) for backend in wanted}
    out = {backend: reason for backend, reason in reasons.items() if reason is not None}
    sound = [backend for backend in wanted if backend not in out]
    if not sound:
        raise refuse(requested, traits, layout, device_type, out)
    return sound, out


def refuse(
    requested: Backend, traits: Traits, layout: Layout, device_type: str, reasons: dict[Backend, str]
) -> ModelError:
    """The error for a model that no wanted backend can compute."""
    what = f"attention.backend={requested.value}, collate={layout.value} on {device_type}: not sound for {traits.name}"
    if traits.recurrent is not None:
        what += f" ({traits.recurrent})"
    if traits.other_layers:
        what += f" (layers of type {', '.join(traits.other_layers)})"
    if len(set(reasons.values())) == 1:
        return ModelError(f"{what}: {next(iter(reasons.values()))}")
    return ModelError(f"{what}. " + "; ".join(f"{backend.value}: {reason}" for backend, reason in reasons.items()))
