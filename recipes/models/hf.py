"""`model=hf`: a pretrained model from a folder or from the Hugging Face hub.

What looks like a path is never asked for at the hub. A folder may be a whole model, a run's `final/` say, or a PEFT
adapter, which is loaded onto its base and merged into it.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from conf.schema import ModelConfig
from recipes.models.errors import ModelError

__all__ = ["load", "load_folder", "load_tokenizer", "quiet"]

log = logging.getLogger(__name__)

_Loaded = TypeVar("_Loaded")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load(config: ModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and tokenizer that `model.name` and `model.tokenizer` mean.

    Args:
        config: Options; read are name, tokenizer, dtype and trust_remote_code.
        seed: Not used: nothing is random, since a checkpoint that lacks weights is refused.

    Returns:
        Model on the CPU in evaluation mode, and tokenizer.

    Raises:
        ModelError: There is no such model, or it is no causal language model, or its weights are incomplete.
    """
    if config.name is None:
        raise ModelError("model.name is null: accepted are the path of a folder and a hub id")
    where = _locate(config.name, "model.name")
    dtype = getattr(torch, config.dtype.value)
    model = load_folder(where, dtype=dtype, trust_remote_code=config.trust_remote_code)
    return model, load_tokenizer(config, where)


def load_folder(where: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model from a folder, or from a hub id; an adapter is merged into its base.

    Args:
        where: Folder or hub id.
        dtype: Of the parameters.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ModelError: As for `load`.
    """
    base_name = _base_of_adapter(where)
    if base_name is not None:
        base = load_folder(_locate(base_name, f"base_model_name_or_path of {where}"), dtype=dtype)
        adapted = _attempt(where, lambda: PeftModel.from_pretrained(base, where))
        merged = adapted.merge_and_unload()
        return merged.requires_grad_(True)  # PEFT froze the base
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = _attempt(where, lambda: AutoConfig.from_pretrained(where, **options))
    loader = _loader(where, config)
    model, report = _attempt(
        where,
        lambda: loader.from_pretrained(where, config=config, dtype=dtype, output_loading_info=True, **options),
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model.name={where}: its files lack {len(missing)} weights of {type(model).__name__} ({missing[0]}, …), "
            "which would be random; give the folder of a whole model"
        )
    return model


def _locate(name: str, key: str) -> str:
    """Tell a folder from a hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").exists() or (path / "adapter_config.json").exists():
            return str(path)
        hint = f"; did you mean {path / 'final'}" if (path / "final" / "config.json").exists() else ""
        raise ModelError(f"{key}={name}: no config.json and no adapter_config.json in this folder{hint}")
    if path.exists():
        raise ModelError(f"{key}={name} is a file: accepted are a model's folder and a hub id")
    is_path = not _HUB_ID.fullmatch(name) or name.startswith((".", "-")) or ("/" in name and path.parent.is_dir())
    if is_path:
        raise ModelError(f"{key}={name} does not exist: accepted are a model's folder and a hub id (owner/name)")
    return name


def _base_of_adapter(where: str) -> str | None:
    file = Path(where) / "adapter_config.json"
    if not file.exists() or (Path(where) / "config.json").exists():
        return None
    name = json.loads(file.read_text()).get("base_model_name_or_path")
    if not name:
        raise ModelError(f"model.name={where}: its adapter_config.json does not name the base model")
    return str(name)


def _loader(where: str, config: PreTrainedConfig) -> Any:
    """The auto class for what the configuration describes."""
    kind, classes = config.model_type, config.architectures or []
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    for loader, mapping in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        named: Any = mapping.get(kind, ())
        names = (named,) if isinstance(named, str) else named
        if names and (not classes or set(classes) & set(names)):
            return loader
    raise ModelError(
        f"model.name={where} holds a {', '.join(classes) or kind}: accepted are causal language models (…ForCausalLM, "
        "…ForConditionalGeneration of a vision-language model)"
    )


def load_tokenizer(config: ModelConfig, where: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `model.tokenizer` means, or else the one in `where`.

    Raises:
        ModelError: There is none.
    """
    source = where if config.tokenizer is None else config.tokenizer
    key = "model.name" if config.tokenizer is None else "model.tokenizer"
    if config.tokenizer is not None and not Path(source).expanduser().is_dir():
        source = _locate(source, key)
    elif (base := _base_of_adapter(where)) and not (Path(where) / "tokenizer_config.json").exists():
        source = base
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        return _attempt(source, lambda: AutoTokenizer.from_pretrained(source, **options), key)
    except ModelError as error:
        raise ModelError(f"{error} (tokenizer; model.tokenizer=<path or hub id> names another)") from error


def _attempt(where: str, call: Callable[[], _Loaded], key: str = "model.name") -> _Loaded:
    """Call a loader, and turn what it raises about its files into one line."""
    try:
        with quiet():
            return call()
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if "trust_remote_code" in str(error):
            lines = ["it comes with Python code of its own, which is run with model.trust_remote_code=true alone"]
        elif not Path(where).exists() and isinstance(error, OSError):
            lines = [
                "no such folder, and the hub does not give it (no such id, no access, or no connection): " + lines[0]
            ]
        raise ModelError(f"{key}={where}: {lines[0][:300]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers' progress bars and the hub's retries off the screen."""
    hub, bars = logging.getLogger("huggingface_hub"), transformers_logging.is_progress_bar_enabled()
    level = hub.level
    hub.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
