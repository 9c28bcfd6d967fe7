"""The folder that a vLLM server loads weights from.

A head that is the embedding is written under its own name too, although a checkpoint leaves it out: on the CPU, vLLM
multiplies with a packed copy of the head, which a reload renews only where the file has the head (seen in 0.32).
Elsewhere the same values are loaded twice.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from conf.schema import LoraExport
from recipes.models.build import LanguageModel
from recipes.models.export import export_model
from recipes.models.scoring import base_of

__all__ = ["write_weights"]

_HEAD_FILE = "head.safetensors"


def write_weights(
    language_model: LanguageModel, folder: Path, export: LoraExport, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write all weights, adapters merged in, or the adapter alone; the folder appears whole or not at all.

    Args:
        language_model: The model in training.
        folder: Replaced where it exists.
        export: Which of the two.
        state_dict: As for `export_model`.

    Raises:
        OSError: It cannot be written.
        ModelError: A weight is not finite.
    """
    config = language_model.config
    config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, export=export))
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        export_model(dataclasses.replace(language_model, config=config), aside, state_dict=state_dict, verify=False)
        if export == LoraExport.merged:
            _add_tied_head(base_of(language_model.model), aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _add_tied_head(model: PreTrainedModel, folder: Path) -> None:
    head = model.get_output_embeddings()
    sources = {
        name: source
        for name, source in model.all_tied_weights_keys.items()
        if model.get_submodule(name.rpartition(".")[0]) is head
    }
    index_path = folder / "model.safetensors.index.json"  # of weights in several files
    index: dict[str, Any] = json.loads(index_path.read_text()) if index_path.exists() else {"weight_map": {}}
    tied = {}
    for name, source in sources.items():
        with safe_open(folder / index["weight_map"].get(source, "model.safetensors"), "pt") as file:
            tied[name] = file.get_tensor(source)
    if not tied:
        return
    save_file(tied, folder / _HEAD_FILE, metadata={"format": "pt"})
    if index_path.exists():
        index["weight_map"] |= dict.fromkeys(tied, _HEAD_FILE)
        index_path.write_text(json.dumps(index))
