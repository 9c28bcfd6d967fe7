"""`final/`: a folder that plain Transformers (or PEFT, for an adapter) loads, and that is loaded once to prove it."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel

from conf.schema import Backend, LoraExport
from recipes.models.build import LanguageModel
from recipes.models.dropout import restore_dropout
from recipes.models.errors import ModelError
from recipes.models.hf import load_folder, quiet
from recipes.models.probe import probe_ids
from recipes.models.scoring import base_of
from recipes.models.tied import drop_tied, verify_tied

__all__ = ["export_model", "merge_adapters"]

log = logging.getLogger(__name__)

_PROBED = 16  # tokens
_PREFIX = "hf."  # of ScoringModel's parameters


def export_model(
    language_model: LanguageModel,
    folder: Path | str,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    verify: bool = True,
) -> None:
    """Write a model and its tokenizer, files readable by everybody (mode 0644).

    A model with adapters is written merged, or as the adapter alone, as `model.lora.export` says; the live model stays
    as it is. The configuration gets the checkpoint's dropout probabilities back. Call it on one rank.

    Args:
        language_model: What `build_model` made.
        folder: New or empty folder; publishing it under its final name is the caller's.
        state_dict: Full state of `language_model.scoring` or of `language_model.model`, where the live tensors are
            shards; None reads the live ones.
        verify: Load the folder again and compare logits: within 1e-5 of their size in float32 (1e-3 where adapters were
            merged).

    Raises:
        ModelError: A weight is not finite, a tied head has come apart, or the loaded model differs.
    """
    folder = Path(folder)
    model, base = language_model.model, base_of(language_model.model)
    state = {
        name.removeprefix(_PREFIX): tensor.detach()
        for name, tensor in (model.state_dict() if state_dict is None else state_dict).items()
    }
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ModelError(f"{len(broken)} tensors are not finite, {broken[0]} for one: not exported")
    folder.mkdir(parents=True, exist_ok=True)
    as_adapter = isinstance(model, PeftModel) and language_model.config.lora.export == LoraExport.adapter
    with quiet():
        if isinstance(model, PeftModel) and as_adapter:
            model.peft_config["default"].base_model_name_or_path = _base_name(language_model)
            model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)  # a form for a model card, not filled in
        else:
            merged = merge_adapters(model, state) if isinstance(model, PeftModel) else state
            _save_whole(base, drop_tied(base, merged), folder, language_model)
        language_model.tokenizer.save_pretrained(folder)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    if verify:
        _verify(language_model, folder)


def merge_adapters(model: PeftModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of the base model with its adapters merged in: weight + scaling * B @ A, in float32, then cast back.

    Args:
        model: Tells which layers have adapters, with which scaling.
        state: Full state of `model`; not changed.

    Returns:
        Tensors under the base model's own names.
    """
    prefix = "base_model.model."
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" not in name and ".trainable_tokens_" not in name:
            plain = name.removeprefix(prefix).replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
            kept[plain] = tensor
    for name, module in base_of(model).named_modules():
        key = f"{prefix}{name}"
        if f"{key}.lora_A.default.weight" in state:
            delta = state[f"{key}.lora_B.default.weight"].float() @ state[f"{key}.lora_A.default.weight"].float()
            delta = delta.T if getattr(module, "fan_in_fan_out", False) else delta
            weight = kept[f"{name}.weight"]
            kept[f"{name}.weight"] = (weight.float() + delta * _scaling(module)).to(weight.dtype)
        rows = f"{key}.token_adapter.trainable_tokens_delta.default"
        if rows in state:
            weight = kept[f"{name}.weight"].clone()
            indices = torch.tensor(module.token_adapter.token_indices["default"], device=weight.device)
            kept[f"{name}.weight"] = weight.index_copy_(0, indices, state[rows].to(weight.dtype))
    return kept


def _scaling(module: nn.Module) -> float:
    return float(module.scaling["default"])  # type: ignore[index]


def _base_name(language_model: LanguageModel) -> str:
    """Where an adapter finds its base: an absolute path, or a hub id."""
    name = language_model.config.name or ""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _save_whole(base: PreTrainedModel, state: dict[str, Tensor], folder: Path, language_model: LanguageModel) -> None:
    config = copy.deepcopy(base.config)
    restore_dropout(config, language_model.dropout)
    # A fresh object of the plain class: sharded wrappers put their own name into config.json.
    plain_class: Any = next(c for c in type(base).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        fresh = plain_class(config).to(base.dtype)
    fresh.generation_config = copy.deepcopy(base.generation_config)
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        fresh.save_pretrained(folder, state_dict=contiguous)
    except ValueError as error:
        # Some checkpoints carry a generation_config.json that Transformers reads but refuses to write.
        log.warning("final: generation_config.json keeps token ids alone: %s", " ".join(str(error).split())[:300])
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        fresh.generation_config = GenerationConfig(**{name: getattr(base.generation_config, name) for name in ids})
        fresh.save_pretrained(folder, state_dict=contiguous)


@torch.no_grad()
def _verify(language_model: LanguageModel, folder: Path) -> None:
    """Load the folder as a user would, and compare it with the live model."""
    live = language_model.model
    base = base_of(live)
    again = load_folder(str(folder), dtype=base.dtype, trust_remote_code=language_model.config.trust_remote_code)
    verify_tied(again, "saving and loading")
    again.to(base.device)  # type: ignore[arg-type]
    again.set_attn_implementation(Backend(language_model.backend).value)
    inputs = {
        "input_ids": torch.tensor(probe_ids(base, _PROBED), device=base.device),
        "use_cache": False,
    }
    was_training = live.training
    live.eval()
    try:
        with torch.autocast(base.device.type, enabled=False):
            expected, got = live(**inputs).logits.float(), again.eval()(**inputs).logits.float()
    finally:
        live.train(was_training)
    # Merged weights are rounded to the model's dtype, and summed in another order than base and adapter apart: 4e-5 of
    # the largest logit after 30 layers in float32. Weights that are wrong differ by their own size.
    is_merged = isinstance(live, PeftModel)
    tolerance = 5e-2 if base.dtype != torch.float32 else 1e-3 if is_merged else 1e-5
    difference, size = float((expected - got).abs().max()), max(1.0, float(expected.abs().max()))
    if not difference <= tolerance * size:
        raise ModelError(
            f"{folder} was written, but loads as another model: its logits differ by {difference:.2g} "
            f"(largest logit {size:.2g}, allowed {tolerance * size:.2g})"
        )
