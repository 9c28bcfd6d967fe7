"""Tiny random models of many families: small enough that a forward takes a millisecond or two."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 61
WINDOW = 4  # sliding windows are shorter than the documents of the tests

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # large, so that a leak is large
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}


def _text(prefix: str, **options: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **options})
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def _gpt2() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=4,
            initializer_range=0.5,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _gemma3(**options: Any) -> PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        **_COMMON, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], **options
    )
    return transformers.Gemma3ForCausalLM(config)


def _qwen_vl(prefix: str, vision: dict[str, Any]) -> PreTrainedModel:
    text = {**_COMMON, "rope_parameters": dict(_MROPE), "head_dim": 4}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text,
        vision_config=vision,
        vocab_size=VOCABULARY,
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: _text("Llama"),
    "qwen3": lambda: _text("Qwen3", head_dim=8),
    "mistral": lambda: _text("Mistral", sliding_window=WINDOW),
    "gemma2": lambda: _text(
        "Gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _gemma3,
    "qwen2_moe_window": lambda: _text(
        "Qwen2Moe",
        **_MOE,
        shared_expert_intermediate_size=16,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=0,
    ),
    "qwen3_moe": lambda: _text("Qwen3Moe", head_dim=8, **_MOE),
    "gpt2": _gpt2,
    "cohere": lambda: _text("Cohere", logit_scale=0.125),
    "granite": lambda: _text(
        "Granite", logits_scaling=4.0, embedding_multiplier=2.0, attention_multiplier=0.5, residual_multiplier=0.5
    ),
    "gpt_oss": lambda: _text(
        "GptOss", head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], **_MOE
    ),
    "qwen2_vl": lambda: _qwen_vl("Qwen2VL", {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2}),
    "qwen2_5_vl": lambda: _qwen_vl(
        "Qwen2_5_VL",
        {
            "depth": 1,
            "hidden_size": 8,
            "out_hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 8,
            "fullatt_block_indexes": [0],
        },
    ),
    "qwen3_vl": lambda: _qwen_vl(
        "Qwen3VL",
        {
            "depth": 1,
            "hidden_size": 8,
            "out_hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 8,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
    "mamba2": lambda: _text("Mamba2", num_heads=4, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8),
    "qwen3_next": lambda: _text(
        "Qwen3Next",
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        **_MOE,
    ),
    "falcon_h1": lambda: _text(
        "FalconH1",
        mamba_d_ssm=16,
        mamba_n_heads=2,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "bert": lambda: transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    ),
}


def build_family(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a model in evaluation mode; the same weights for the same seed."""
    torch.manual_seed(seed)
    return FAMILIES[name]().eval()
