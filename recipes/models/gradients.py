"""A check for after the first backward: does every trainable tensor get a gradient?"""

import torch
from torch import nn

from recipes.models.errors import ModelError

__all__ = ["assert_gradients_reach"]


def assert_gradients_reach(model: nn.Module) -> None:
    """Check the gradients that a backward left.

    Without it a run trains on with a part that never moves, as happens when checkpointing cuts adapters off from the
    loss. Call it after the first backward of a step with weight, before gradients are cleared. A gradient of exact
    zeros is fine in general (the first matrices of fresh adapters have it, the second ones being 0), but not in every
    second matrix at once.

    Args:
        model: Any module; parameters that do not require a gradient are left out.

    Raises:
        ModelError: Naming the tensors without a gradient.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("no tensor of the model is trainable")
    missing = [name for name, p in trainable if p.grad is None]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(trainable)} trainable tensors got no gradient from the first backward, so they "
            f"would never change: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}. Freeze them, or turn "
            "off what cuts them off from the loss (reentrant gradient checkpointing does)"
        )
    second = [p.grad for name, p in trainable if ".lora_B." in name and p.grad is not None]
    if second and not any(bool(torch.count_nonzero(gradient)) for gradient in second):
        raise ModelError(
            f"all {len(second)} lora_B tensors got a gradient of exact zeros from the first backward: the adapters are "
            "cut off from the loss, or the step has no weighted token"
        )
