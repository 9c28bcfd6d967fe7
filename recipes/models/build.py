"""A model, ready to be trained, from its options.

`build_model` calls the `_target_` of the options, then does to any model what the other options say, in this order:
added tokens, dtype, dropout, device, attention backend, adapters, gradient checkpointing, compilation. What cannot be
done is refused here, before the first step.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import PeftModel
from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conf.schema import Backend, CommonConfig, Layout, LoraExport, ModelConfig, PositionAxes, Scope
from recipes.models import attention  # noqa: F401  (registers document_sdpa)
from recipes.models.backends import candidates, refuse
from recipes.models.dropout import Originals, override_dropout
from recipes.models.errors import ModelError
from recipes.models.lora import add_lora
from recipes.models.probe import find_leak, find_unused_parts
from recipes.models.scoring import ScoringModel, base_of
from recipes.models.tied import verify_tied
from recipes.models.traits import read_traits
from recipes.runtime.build import locate

__all__ = ["LanguageModel", "build_configured_model", "build_model"]

log = logging.getLogger(__name__)

_LEARNT_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings)$")


@dataclass
class LanguageModel:
    """A model and what belongs to it.

    Attributes:
        scoring: What is trained and what Accelerate wraps.
        tokenizer: Its tokenizer.
        config: The options it was built from.
        backend: Name of the attention backend in use; `auto` has been resolved.
        notes: Lines worth printing before training: choices that were made, and why.
        dropout: Dropout probabilities of the checkpoint, which an export puts back.
    """

    scoring: ScoringModel
    tokenizer: PreTrainedTokenizerBase
    config: ModelConfig
    backend: str
    notes: list[str] = field(default_factory=list)
    dropout: Originals = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """The Transformers or PEFT model, which generates and is exported."""
        return self.scoring.hf

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids from here on are refused."""
        return _rows(base_of(self.model))

    @property
    def is_moe(self) -> bool:
        """Whether tokens are routed to experts, whose batches change shape with the layout."""
        return read_traits(base_of(self.model)).is_moe

    @property
    def max_positions(self) -> int | None:
        """Longest document that learnt position embeddings allow; None for rotary ones."""
        base = base_of(self.model)
        has_table = any(isinstance(m, nn.Embedding) and _LEARNT_POSITIONS.search(n) for n, m in base.named_modules())
        return int(base.config.get_text_config().max_position_embeddings) if has_table else None


def build_configured_model(config: CommonConfig, device: torch.device | str) -> LanguageModel:
    """Build the model of a recipe for its layout, seed and attention; see `build_model`."""
    return build_model(
        config.model,
        seed=config.train.seed,
        backend=config.attention.backend,
        layout=config.collate.layout,
        scope=config.attention.scope,
        axes=config.positions.axes,
        allow_targets=config.allow_targets,
        device=device,
    )


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    backend: Backend = Backend.auto,
    layout: Layout = Layout.padded,
    scope: Scope = Scope.per_document,
    axes: PositionAxes = PositionAxes.rope,
    allow_targets: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Build a model for a layout, and make sure that documents do not see each other in it.

    Args:
        config: Options; `_target_` is called as `target(config, seed)` and returns `(model, tokenizer)`.
        seed: Of everything random: new weights, new embeddings, adapters. The global generator is left as it was.
        backend: Attention backend; `auto` takes the first sound one.
        layout: How batches will be laid out.
        scope: Who will see whom in a packed row.
        axes: Rotary axes to feed.
        allow_targets: Modules that `_target_` may name beside the usual ones.
        device: Where the model goes.

    Returns:
        The model in training mode, with its tokenizer.

    Raises:
        ModelError: The model cannot be had, or cannot do what is asked.
        ConfigError: `_target_` is not allowed or does not exist.
    """
    target = locate(config._target_, allow_targets, key="model._target_")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer = target(config, seed)
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ModelError(f"model._target_={config._target_} gave a {type(model).__name__}: not a language model")
        verify_tied(model, "loading")
        new_tokens = _add_tokens(model, tokenizer, config.added_tokens)
        verify_tied(model, "adding tokens")
    _cast(model, getattr(torch, config.dtype.value))
    dropout = override_dropout(model, model.config, config.dropout)
    # Rows of an embedding that is told its padding id get no gradient; ids are not what padding is known by here, and
    # the end token of many models has that id.
    cast(nn.Embedding, model.get_input_embeddings()).padding_idx = None
    _prepare_generation(model, tokenizer)
    model.to(device)  # type: ignore[arg-type]

    notes: list[str] = []
    chosen = _choose_backend(model, backend, layout, scope, axes, notes)
    unused_parts = find_unused_parts(model)
    for name in unused_parts:
        model.get_submodule(name).requires_grad_(False)
        notes.append(f"{name} is frozen: text does not reach it")

    trained: PreTrainedModel | PeftModel = model
    if config.lora.rank:
        if config.lora.export == LoraExport.adapter:
            _require_loadable_base(config, new_tokens)
        trained = add_lora(model, config.lora, seed=seed, new_tokens=new_tokens, unused_parts=unused_parts)
        verify_tied(model, "adding adapters")
    if config.gradient_checkpointing:
        try:
            model.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise ModelError(f"model.gradient_checkpointing=true: {error}") from error
    scoring = ScoringModel(trained, backend=chosen, scope=scope, axes=axes)
    if scoring.full_logits_reason is not None:
        notes.append(
            f"log-probabilities are read off full logits, which takes more memory: {scoring.full_logits_reason}"
        )
    if config.compile:  # after the probes, which would be compiled too
        for layer in _decoder_layers(model):
            layer.compile()
    scoring.train()
    return LanguageModel(scoring, tokenizer, config, chosen.value, notes, dropout)


def _add_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    """Add special tokens; the embedding grows where it must and never shrinks. Returns the ids of new tokens."""
    known = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    if not new:
        return []
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in new], special_tokens=True)
    if len(tokenizer) > _rows(model):
        model.resize_token_embeddings(len(tokenizer))
    return [int(i) for i in tokenizer.convert_tokens_to_ids(new)]  # type: ignore[union-attr]


def _rows(model: PreTrainedModel) -> int:
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters but for those the model keeps in float32; buffers (rotary frequencies, say) stay as they are."""
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _prepare_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give generation its end and padding ids, where the checkpoint does not."""
    generation = model.generation_config
    if generation is None:
        return
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        end = generation.eos_token_id
        pad = tokenizer.pad_token_id
        generation.pad_token_id = pad if pad is not None else end[0] if isinstance(end, list) else end


def _choose_backend(
    model: PreTrainedModel,
    requested: Backend,
    layout: Layout,
    scope: Scope,
    axes: PositionAxes,
    notes: list[str],
) -> Backend:
    """Set the first backend that the rules allow and the model passes with."""
    traits = read_traits(model)
    if axes == PositionAxes.mrope and not traits.has_mrope:
        raise ModelError(f"positions=mrope: {traits.name} has one rotary axis; use positions=rope")
    device = model.device.type
    sound, reasons = candidates(requested, traits, layout, device)
    for backend in sound:
        try:
            model.set_attn_implementation(backend.value)
        except (ValueError, ImportError) as error:
            reasons[backend] = str(error)
            continue
        problem = find_leak(model, backend=backend, layout=layout, scope=scope, axes=axes)
        if problem is None:
            notes += [f"attention.backend={over.value} is passed over: {reason}" for over, reason in reasons.items()]
            return backend
        if traits.has_mrope and axes == PositionAxes.rope:
            problem += " (its rotary embedding has several axes; use positions=mrope)"
        reasons[backend] = problem
    raise refuse(requested, traits, layout, device, reasons)


def _require_loadable_base(config: ModelConfig, new_tokens: list[int]) -> None:
    """Refuse to train an adapter that could not be loaded again."""
    if new_tokens:
        raise ModelError(
            "model.lora.export=adapter with model.added_tokens: the new embeddings belong to the base, which an "
            "adapter does not hold; use model.lora.export=merged"
        )
    if config.name is None:
        raise ModelError(
            "model.lora.export=adapter: an adapter names the base that it belongs to, and this model has no "
            "model.name; use model.lora.export=merged"
        )


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"model.compile=true: the decoder layers of {type(model).__name__} were not found; use false")
