"""How a model's logits come from its last hidden states, found out and checked on the model itself.

    logits = softcap(scale * (hidden @ weight.T + bias))        softcap(z) = cap * tanh(z / cap)

Candidates for scale and cap are read from the configuration. Two checks follow. That nothing stands between the last
hidden states and the head. And that logits of large hidden states, where soft-capping shows, are what the formula says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from recipes.models.probe import probe_context, probe_ids

__all__ = ["Head", "read_head"]

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")  # some multiply, some divide
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "final_logit_softcap")
_PROBED = 8  # tokens


@dataclass(frozen=True)
class Head:
    """What turns the head's plain output into logits.

    Attributes:
        scale: Factor, before soft-capping.
        softcap: Bound of the logits; None without one.
    """

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, raw: Tensor) -> Tensor:
        """Logits from the head's plain output."""
        scaled = raw * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@torch.no_grad()
def read_head(model: PreTrainedModel) -> Head | str:
    """Read the head of a model; where that is impossible, say why."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return f"the head is a {type(linear).__name__}, not a plain torch.nn.Linear"
    if model.base_model is model:
        return f"{type(model).__name__} has no separate body below the head"
    candidates = _candidates(model)
    caps = [head.softcap for head in candidates if head.softcap is not None]
    wanted_spread = min([50.0, *caps])
    caught: list[Tensor] = []
    replaced: list[Tensor] = []

    def swap(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Keep what the head would get, and hand it something whose logits are large, or about as large as the cap."""
        caught.append(args[0])
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(args[0].shape, generator=generator).to(args[0])
        spread = F.linear(noise, linear.weight, linear.bias).float().std().clamp_min(1e-30)
        replaced.append(noise * (wanted_spread / spread).to(noise.dtype))
        return (replaced[-1],)

    was_training = model.training
    model.eval()
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor(probe_ids(model, _PROBED), device=model.device),
        "use_cache": False,
    }
    try:
        with probe_context(model):
            hidden = model.base_model(**inputs).last_hidden_state
            handle = linear.register_forward_pre_hook(swap)
            try:
                logits = model(**inputs).logits
            finally:
                handle.remove()
    except (TypeError, AttributeError) as error:
        return f"{type(model).__name__} cannot be run in two parts: {error}"
    finally:
        model.train(was_training)
    if len(caught) != 1:
        return f"{type(model).__name__} does not call its head once"
    exact = caught[0].dtype == linear.weight.dtype == logits.dtype == torch.float32
    tolerance = 1e-5 if exact and not torch.is_autocast_enabled(model.device.type) else 2e-2  # of the largest value
    if not _close(caught[0], hidden, tolerance):
        return f"{type(model).__name__} changes hidden states between its body and its head"
    with probe_context(model):
        raw = F.linear(replaced[0], linear.weight, linear.bias).float()
    for head in candidates:
        if _close(head.logits(raw), logits.float(), tolerance):
            return head
    return f"{type(model).__name__} treats its logits in a way that is not known here"


def _candidates(model: PreTrainedModel) -> list[Head]:
    config = model.config.get_text_config()
    values = [getattr(config, name, None) for name in _SCALES]
    scales = [1.0]
    for value in values:
        if isinstance(value, (int, float)) and value not in (0, 1):
            scales += [float(value), 1.0 / value]
    caps = [getattr(config, name, None) for name in _CAPS]
    found = [float(cap) for cap in caps if isinstance(cap, (int, float)) and cap > 0]
    return [Head(scale, cap) for cap in (*found, None) for scale in scales]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max().clamp_min(1e-30))
