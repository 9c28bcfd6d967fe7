"""What of a model decides how it may be fed: read from its configuration and its modules."""

import inspect
import re
from dataclasses import dataclass

from transformers import PreTrainedModel

from conf.schema import Backend

__all__ = ["Traits", "read_traits"]

# Layer types (transformers.configuration_utils.ALLOWED_LAYER_TYPES) whose mask is causal, perhaps with a window.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "moe", "sparse", "dense"}
_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_RECURRENT_MODULES = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|LSTM|Rglru|RgLru|Recurrent|Delta(Net|Rule|Attention)|LightningAttention|ShortConv|Retention"
)


@dataclass(frozen=True)
class Traits:
    """Traits of one model.

    Attributes:
        name: Class of the model.
        recurrent: What carries state along the row; None for attention alone.
        other_layers: Layer types whose attention this package does not know.
        has_softcap: Attention scores are soft-capped.
        has_sinks: Attention has learnt sinks.
        has_chunks: Some layers attend within fixed chunks.
        has_windows: Some layers attend within a sliding window.
        passes_windows: Layers tell the attention function their window; where not, only the mask knows.
        has_mrope: Rotary embeddings with several axes (t, h, w).
        is_moe: Tokens are routed to experts, in batches that depend on the other tokens.
        supported: Backends that the model class implements.
    """

    name: str
    recurrent: str | None = None
    other_layers: tuple[str, ...] = ()
    has_softcap: bool = False
    has_sinks: bool = False
    has_chunks: bool = False
    has_windows: bool = False
    passes_windows: bool = True
    has_mrope: bool = False
    is_moe: bool = False
    supported: frozenset[Backend] = frozenset(Backend)


def read_traits(model: PreTrainedModel) -> Traits:
    """Read the traits of a model, the text part of it where it has several."""
    config = model.config.get_text_config()
    layers = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    window = getattr(config, "sliding_window", None)
    try:
        source = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
    except (OSError, TypeError):
        source = ""
    return Traits(
        name=type(model).__name__,
        recurrent=_recurrence(model, layers),
        other_layers=tuple(sorted(layers - _ATTENTION_LAYERS - _RECURRENT_LAYERS)),
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        has_sinks=any(name.rpartition(".")[2] in ("sinks", "sink") for name, _ in model.named_parameters()),
        has_chunks=getattr(config, "attention_chunk_size", None) is not None,
        has_windows=window is not None and ("sliding_attention" in layers or not layers),
        passes_windows="sliding_window=" in source,
        has_mrope="mrope_section" in str(rope),
        is_moe=any("expert" in name.lower() for name, _ in model.named_modules()),
        supported=_supported(model),
    )


def _recurrence(model: PreTrainedModel, layers: set[str]) -> str | None:
    if found := sorted(layers & _RECURRENT_LAYERS):
        return f"layers of type {', '.join(found)}"
    modules = sorted({type(m).__name__ for m in model.modules() if _RECURRENT_MODULES.search(type(m).__name__)})
    modules = [name for name in modules if name != type(model).__name__]
    if modules:
        return f"modules {', '.join(modules[:3])}"
    return f"class {type(model).__name__}" if model._is_stateful else None


def _supported(model: PreTrainedModel) -> frozenset[Backend]:
    if not model._can_set_attn_implementation():  # its own code chooses
        return frozenset(b for b in Backend if b.value == model.config._attn_implementation)
    found = {Backend.eager}
    if model._supports_sdpa:
        found |= {Backend.sdpa, Backend.document_sdpa}
    if model._supports_flex_attn:
        found.add(Backend.flex_attention)
    if model._supports_flash_attn:
        found.add(Backend.flash_attention_2)
    return frozenset(found)
