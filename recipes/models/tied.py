"""Heads that are the embedding: one tensor, two names, which resizing, adapters, saving and loading can tear apart."""

from torch import Tensor
from transformers import PreTrainedModel

from recipes.models.errors import ModelError

__all__ = ["drop_tied", "is_tied", "verify_tied"]


def is_tied(model: PreTrainedModel) -> bool:
    """Whether head and embedding share a tensor, adapters around them or not."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        return False
    return bool({id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()})


def verify_tied(model: PreTrainedModel, after: str) -> None:
    """Check that a model whose configuration ties its head still has it tied.

    Raises:
        ModelError: Naming what was done last.
    """
    if getattr(model.config, "tie_word_embeddings", False) and not is_tied(model):
        raise ModelError(
            f"{type(model).__name__}: config.json says that the head is the embedding (tie_word_embeddings), but after "
            f"{after} they are two tensors; training would change one and not the other"
        )


def drop_tied(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave the second name of each shared tensor out of a state dict, once both are seen to be equal.

    Raises:
        ModelError: The two names hold different values.
    """
    kept = dict(state_dict)
    for name, source in model.all_tied_weights_keys.items():
        if name not in kept or source not in kept:
            continue
        if not kept[name].equal(kept[source]):
            raise ModelError(f"{name} and {source} are one tensor by config.json, but hold different values; not saved")
        del kept[name]
    return kept
