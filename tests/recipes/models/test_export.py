"""final/: what is written loads without this package, and is the model that was trained."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from conf.schema import Dtype, HFModelConfig, LoraConfig, LoraExport, TinyModelConfig
from recipes.models.build import LanguageModel
from recipes.models.errors import ModelError
from recipes.models.export import export_model
from recipes.models.scoring import base_of
from tests.recipes.models.families import MROPE, build, collate, documents, family_config

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def train_a_little(built: LanguageModel) -> None:
    """Steps large enough that an untrained copy would be told apart."""
    batch = collate(documents(), packed=False)
    trainable = [p for p in built.scoring.parameters() if p.requires_grad]
    for _ in range(3):
        built.scoring(batch, batch["input_ids"], batch["attention_mask"].bool()).logprobs.mean().neg().backward()
        with torch.no_grad():
            for parameter in trainable:
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_moe", "mamba2", *MROPE])
def test_a_whole_model_loads_with_plain_transformers(family: str, tmp_path: Path) -> None:
    built = build(family_config(family))
    train_a_little(built)
    export_model(built, tmp_path)
    loader = AutoModelForImageTextToText if family in MROPE else AutoModelForCausalLM
    again, report = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(again) is type(built.model)
    expected = logits(built.model)
    assert (logits(again) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path)("t5 t6")["input_ids"] == built.tokenizer("t5 t6")["input_ids"]
    assert {oct(file.stat().st_mode)[-3:] for file in tmp_path.iterdir()} == {"644"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(built.model).__name__]
    # And a run continues from it.
    assert build(HFModelConfig(name=str(tmp_path))).vocab_size == built.vocab_size


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("added", [[], ["<a>", "<b>"]])
def test_merged_adapters_load_without_peft(family: str, added: list[str], tmp_path: Path) -> None:
    built = build(family_config(family, added_tokens=added, lora=LoraConfig(rank=2, alpha=3.0)))
    before = {name: tensor.clone() for name, tensor in built.scoring.state_dict().items()}
    untrained = logits(built.model)
    train_a_little(built)
    export_model(built, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = logits(built.model)
    assert (logits(again) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert (untrained - expected).abs().max() > 0.01
    assert not any("lora" in name for name in again.state_dict())
    # The live model keeps its adapters.
    assert before.keys() == built.scoring.state_dict().keys()


def test_an_adapter_alone_loads_with_peft_and_with_this_package(tmp_path: Path) -> None:
    export_model(build(family_config("llama")), tmp_path / "base")
    lora = LoraConfig(rank=2, export=LoraExport.adapter)
    built = build(HFModelConfig(name=str(tmp_path / "base"), lora=lora))
    train_a_little(built)
    export_model(built, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    expected = logits(built.model)
    for again in (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        build(HFModelConfig(name=str(tmp_path / "adapter"))).model,
    ):
        assert (logits(again) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)])
def test_a_tied_head_is_written_once_and_is_tied_again(lora: LoraConfig, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    built = build(TinyModelConfig(**sizes, tie_embeddings=True, added_tokens=["<a>"], lora=lora))
    train_a_little(built)
    export_model(built, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert len(again.lm_head.weight) == built.vocab_size
    torch.testing.assert_close(logits(again), logits(built.model), rtol=0, atol=1e-5)


def test_a_full_state_dict_can_be_handed_in(tmp_path: Path) -> None:
    built = build(family_config("gpt2", lora=LoraConfig(rank=2)))
    state = {name: tensor.clone() for name, tensor in built.scoring.state_dict().items()}
    train_a_little(built)
    export_model(built, tmp_path, state_dict=state, verify=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    untrained = build(family_config("gpt2", lora=LoraConfig(rank=2)))
    torch.testing.assert_close(logits(again), logits(untrained.model), rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match="was written, but loads as another model: its logits differ by"):
        export_model(built, tmp_path / "checked", state_dict=state)


def test_a_tied_head_that_has_come_apart_is_not_written(tmp_path: Path) -> None:
    built = build(family_config("gpt2"))
    state = {name: tensor.clone() for name, tensor in built.scoring.state_dict().items()}
    state["hf.lm_head.weight"] += 1
    with pytest.raises(ModelError, match=r"lm_head.weight and transformer.wte.weight are one tensor by config.json"):
        export_model(built, tmp_path, state_dict=state)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    built = build(family_config("llama"))
    with torch.no_grad():
        base_of(built.model).model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match=r"1 tensors are not finite, model.norm.weight for one: not exported"):
        export_model(built, tmp_path / "final")
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)])
def test_bf16_weights_stay_bf16(lora: LoraConfig, tmp_path: Path) -> None:
    built = build(family_config("llama", dtype=Dtype.bfloat16, lora=lora))
    train_a_little(built)
    export_model(built, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_dropout_of_the_checkpoint_comes_back(tmp_path: Path) -> None:
    built = build(family_config("gpt2"))
    assert built.model.config.attn_pdrop == 0.0
    export_model(built, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_pdrop"] == 0.1
    assert built.model.config.attn_pdrop == 0.0


def test_a_generation_config_that_cannot_be_written_keeps_its_token_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = build(family_config("llama"))
    built.model.generation_config.temperature = 0.6  # without do_sample, as several checkpoints have it
    export_model(built, tmp_path)
    written = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (written.eos_token_id, written.pad_token_id, written.temperature) == (2, 2, None)
    assert "generation_config.json keeps token ids alone: GenerationConfig is invalid" in caplog.text
