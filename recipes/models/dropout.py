"""Randomness inside a model: one option overrides every probability that the checkpoint brings."""

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

__all__ = ["override_dropout", "restore_dropout"]

_DROPOUT = re.compile(r"dropout|pdrop")
_NOISE = re.compile(r"layerdrop|drop_path|jitter")  # not a dropout of single values: always off

Originals = dict[tuple[str, str], float]


def override_dropout(model: nn.Module, config: PreTrainedConfig, probability: float) -> Originals:
    """Set every dropout probability of a model and its configuration, that of attention weights too.

    Layer drop, stochastic depth and router noise are turned off.

    Args:
        model: Changed in place.
        config: Its configuration, changed in place with all nested ones.
        probability: The new value.

    Returns:
        The configuration's values as they were, for `restore_dropout`.
    """
    originals: Originals = {}
    for path, part in _configs(config):
        for name, value in _probabilities(vars(part), probability):
            originals[path, name] = getattr(part, name)
            setattr(part, name, value)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = probability
        for name, value in _probabilities(vars(module), probability):
            setattr(module, name, value)
    return originals


def restore_dropout(config: PreTrainedConfig, originals: Originals) -> None:
    """Put the checkpoint's probabilities back into a configuration (an exported copy)."""
    parts = dict(_configs(config))
    for (path, name), value in originals.items():
        setattr(parts[path], name, value)


def _configs(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value, f"{path}.{name}")


def _probabilities(attributes: dict[str, object], probability: float) -> Iterator[tuple[str, float]]:
    for name, value in list(attributes.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if _DROPOUT.search(name):
                yield name, probability
            elif _NOISE.search(name):
                yield name, 0.0
