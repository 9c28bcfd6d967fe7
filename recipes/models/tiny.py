"""`model=tiny`: a small Llama with random weights and the tokenizer of this repository, without any download."""

from importlib.resources import as_file, files
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from conf.schema import TinyModelConfig
from recipes.models.errors import ModelError

__all__ = ["build"]


def build(config: TinyModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the model from its sizes.

    Args:
        config: Sizes; `tokenizer` names a folder with another tokenizer.
        seed: Of the weights; the global generator is left as it was.

    Returns:
        Float32 model on the CPU, with as many embeddings as the tokenizer has tokens, and tokenizer.

    Raises:
        ModelError: The tokenizer is not there.
    """
    tokenizer = _load_tokenizer(config.tokenizer)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama), tokenizer


def _load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    if name is not None:
        folder = Path(name).expanduser()
        if not (folder / "tokenizer_config.json").exists():
            raise ModelError(f"model.tokenizer={name}: model=tiny takes a folder that holds a tokenizer")
        return AutoTokenizer.from_pretrained(folder)
    with as_file(files("recipes") / "demo" / "tokenizer") as folder:
        if not (folder / "tokenizer_config.json").exists():
            raise ModelError(f"{folder} is missing: the installation is incomplete; pip install it again")
        return AutoTokenizer.from_pretrained(folder)
