"""Low-rank adapters through PEFT."""

import warnings

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from conf.schema import LoraConfig
from recipes.models.errors import ModelError
from recipes.models.tied import is_tied

__all__ = ["add_lora"]

_ADAPTABLE = (nn.Linear, Conv1D, nn.Embedding)


def add_lora(
    model: PreTrainedModel, config: LoraConfig, *, seed: int, new_tokens: list[int], unused_parts: list[str]
) -> PeftModel:
    """Freeze a model and put adapters in.

    `all-linear` means every linear layer but the head. The embeddings of `new_tokens` are trained in full, since a
    frozen random row would stay random.

    Args:
        model: Changed in place.
        config: Rank, alpha, dropout, target modules.
        seed: Of the adapters' first matrices; the second ones start at 0.
        new_tokens: Ids of tokens that were added.
        unused_parts: Prefixes of modules that text does not reach; they get no adapters.

    Raises:
        ModelError: A target module does not exist, or is the head of a model whose head is its embedding.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    adaptable = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _ADAPTABLE) and not name.startswith(tuple(f"{part}." for part in unused_parts))
    }
    linear = {
        name.rpartition(".")[2]
        for name, module in adaptable.items()
        if not isinstance(module, nn.Embedding) and module is not head
    }
    targets = sorted(linear) if config.target_modules == "all-linear" else list(config.target_modules)
    for target in targets:
        matches = [module for name, module in adaptable.items() if f".{name}".endswith(f".{target}")]
        if not matches:
            raise ModelError(
                f"model.lora.target_modules: {type(model).__name__} has no module {target}; it has "
                f"{', '.join(sorted(linear))} (or all-linear)"
            )
        if is_tied(model) and any(module is head or module is embedding for module in matches):
            raise ModelError(
                f"model.lora.target_modules: {target} is one tensor with the embedding or the head of "
                f"{type(model).__name__}, and an adapter on one of them would untie them; leave it out"
            )
    untouched = [
        name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE) and name not in adaptable
    ]
    if config.target_modules == "all-linear":
        untouched.append(names[id(head)])
    rows = [names[id(embedding)]] if is_tied(model) else [names[id(embedding)], names[id(head)]]
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=untouched,
        task_type="CAUSAL_LM",
        trainable_token_indices=dict.fromkeys(rows, new_tokens) if new_tokens else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            # PEFT asks by a name that Transformers has since changed.
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            return get_peft_model(model, peft_config)
