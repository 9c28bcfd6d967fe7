"""`model=tiny`: a small Llama with random weights and the tokenizer of this repository, without any download."""

from importlib.resources import as_file, files

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from conf.schema import TinyModelConfig
from recipes.models.hf import load_tokenizer

__all__ = ["build"]


def build(config: TinyModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the model from its sizes.

    Args:
        config: Sizes; `tokenizer` names another tokenizer.
        seed: Of the weights; the global generator is left as it was.

    Returns:
        Float32 model on the CPU, with as many embeddings as the tokenizer has tokens, and tokenizer.

    Raises:
        ModelError: The tokenizer is not there.
    """
    with as_file(files("recipes") / "demo" / "tokenizer") as folder:
        tokenizer = load_tokenizer(config, str(folder))
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
