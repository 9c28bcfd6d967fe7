"""Tiny random models of many families, and batches for them: a forward takes a millisecond or two."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conf.schema import Backend, ModelConfig, PositionAxes, Scope
from datum import Datum, collate_datums
from recipes.models.build import LanguageModel, build_model
from recipes.models.inputs import model_inputs

VOCABULARY = 61
WINDOW = 4  # sliding windows are shorter than the documents of the tests
LENGTHS = (5, 7, 5, 9, 1)

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
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 16}


def text_model(prefix: str, **options: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **options})
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def _gpt2() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, initializer_range=0.5, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def _vision_language(prefix: str, **vision: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**_COMMON, "rope_parameters": rope, "head_dim": 4},
        vision_config={"depth": 1, "num_heads": 2, **vision},
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def _opt() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=64, init_std=0.5, pad_token_id=1, **sizes
    )
    return transformers.OPTForCausalLM(config)


def _bert() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)
    return transformers.BertLMHeadModel(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: text_model("Llama"),
    "qwen3": lambda: text_model("Qwen3", head_dim=8),
    "mistral": lambda: text_model("Mistral", sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_COMMON, head_dim=8, **_SLIDING)),
    "gemma2": lambda: text_model(
        "Gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "qwen3_moe": lambda: text_model("Qwen3Moe", head_dim=8, **_MOE),
    # Its layers do not tell the attention function their window.
    "qwen2_moe": lambda: text_model("Qwen2Moe", **_MOE, **_SHARED_EXPERT, use_sliding_window=True, **_SLIDING),
    "gpt2": _gpt2,
    "cohere": lambda: text_model("Cohere", logit_scale=0.125),
    "granite": lambda: text_model("Granite", logits_scaling=4.0, embedding_multiplier=2.0, attention_multiplier=0.5),
    "gpt_oss": lambda: text_model("GptOss", head_dim=8, **_SLIDING, **_MOE),
    "qwen2_vl": lambda: _vision_language("Qwen2VL", embed_dim=8, hidden_size=16),
    "qwen2_5_vl": lambda: _vision_language(
        "Qwen2_5_VL", hidden_size=8, out_hidden_size=16, intermediate_size=8, fullatt_block_indexes=[0]
    ),
    "qwen3_vl": lambda: _vision_language(
        "Qwen3VL",
        hidden_size=8,
        out_hidden_size=16,
        intermediate_size=8,
        deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    ),
    "mamba2": lambda: text_model("Mamba2", num_heads=4, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8),
    "qwen3_next": lambda: text_model(
        "Qwen3Next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **_MOE,
        **_SHARED_EXPERT,
    ),
    "falcon_h1": lambda: text_model(
        "FalconH1",
        mamba_d_ssm=16,
        mamba_n_heads=2,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
        lm_head_multiplier=0.5,
    ),
    # It makes its mask without positions: only the attention function can tell documents apart.
    "opt": _opt,
    "bert": _bert,
}
MOE = ("qwen3_moe", "qwen2_moe", "gpt_oss", "qwen3_next")
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
RECURRENT = ("mamba2", "qwen3_next", "falcon_h1")


def build_family(name: str, backend: Backend | str = Backend.eager, seed: int = 0) -> PreTrainedModel:
    """Build a model in evaluation mode; the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[name]().eval()
    model.set_attn_implementation(Backend(backend).value)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: t0 to t60, with an end token and without a padding token."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token="t2")


def target(config: ModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """What `model._target_` of these tests names; `model.name` is the family."""
    assert config.name is not None
    return build_family(config.name, seed=seed), tokenizer()


def family_config(name: str, **options: Any) -> ModelConfig:
    """Options of a family's model."""
    return ModelConfig(_target_=f"{__name__}.target", name=name, **options)


def build(config: ModelConfig, **options: Any) -> LanguageModel:
    """`build_model` with seed 0, for targets of the tests too."""
    return build_model(config, **{"seed": 0, "allow_targets": ["tests"], **options})


def axes_of(name: str) -> PositionAxes:
    """Rotary axes that a family takes."""
    return PositionAxes.mrope if name in MROPE else PositionAxes.rope


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Token ids of made-up documents; none of them is an image token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY - 8, (length,), generator=generator).tolist() for length in lengths]


def collate(docs: Sequence[Sequence[int]], *, packed: bool = True, divisible: int | None = 4) -> dict[str, Any]:
    """A batch of documents without targets, the row's end padded."""
    return collate_datums([Datum(list(ids)) for ids in docs], packed=packed, pad_seq_len_divisible=divisible)


def logits_of(
    model: PreTrainedModel,
    batch: dict[str, Any],
    axes: PositionAxes = PositionAxes.rope,
    scope: Scope = Scope.per_document,
) -> Tensor:
    """Logits [B, S, V] by the arguments that training uses."""
    backend = Backend(model.config._attn_implementation)
    return model(**model_inputs(batch, backend=backend, scope=scope, axes=axes)).logits


def alone(model: PreTrainedModel, docs: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [T, V] of each document by itself, by the plainest call there is."""
    return [model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in docs]
