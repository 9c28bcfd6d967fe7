"""AdamW and the learning rate of every step."""

import math
from collections.abc import Callable

import torch
from torch import nn

from conf.schema import DecayingSchedulerConfig, OptimConfig, SchedulerConfig, WSDSchedulerConfig
from recipes.models.errors import ModelError


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms, biases and embeddings are not decayed.

    A head that shares the embedding's tensor counts as the embedding.

    Raises:
        ModelError: Nothing is trainable.
    """
    kept_whole = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("the model has no trainable parameter: there is nothing to train")
    is_decayed = {id(p): p.ndim >= 2 and id(p) not in kept_whole for p in trainable}
    groups = [
        {"params": [p for p in trainable if is_decayed[id(p)]], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if not is_decayed[id(p)]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=all(p.device.type in ("cpu", "cuda") for p in trainable),
    )


def learning_rates(scheduler: SchedulerConfig, peak_lr: float, num_steps: int) -> Callable[[int], float]:
    """Learning rate as a function of the step (from 0), so that a resumed run needs no scheduler state.

    Warm-up rises linearly and reaches the peak in step `warmup_steps`: with 4 warm-up steps the first rates are 1/5,
    2/5, 3/5, 4/5 of the peak. linear and cosine fall from there to `min_ratio` of the peak after the last step (with
    min_ratio 0 the last step itself is still taken at a rate above 0); wsd stays at the peak and falls linearly over
    the last `decay_fraction` of the run.

    Raises:
        ValueError: The scheduler has no known name.
    """
    warmup = scheduler.warmup_steps

    def shape(step: int) -> float:
        decaying_steps = max(1, num_steps - warmup)
        done = min(1.0, (step - warmup) / decaying_steps)
        match scheduler:
            case WSDSchedulerConfig():
                decay_steps = max(1, round(num_steps * scheduler.decay_fraction))
                left = min(1.0, max(0.0, (num_steps - step) / decay_steps))
                return scheduler.min_ratio + (1 - scheduler.min_ratio) * left
            case DecayingSchedulerConfig(name="linear"):
                return 1 - (1 - scheduler.min_ratio) * done
            case DecayingSchedulerConfig(name="cosine"):
                return scheduler.min_ratio + (1 - scheduler.min_ratio) * (1 + math.cos(math.pi * done)) / 2
            case SchedulerConfig(name="constant"):
                return 1.0
        raise ValueError(f"scheduler {scheduler.name!r} has no shape: accepted are constant, linear, cosine, wsd")

    def rate(step: int) -> float:
        return peak_lr * ((step + 1) / (warmup + 1) if step < warmup else shape(step))

    return rate
