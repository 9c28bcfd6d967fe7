"""model=hf: folders, hub ids, adapters, and whatever is wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from conf.schema import Backend, Dtype, HFModelConfig, Layout
from recipes.models.errors import ModelError
from tests.recipes.models.families import build, build_family, tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    build_family("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def same_logits(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    one.set_attn_implementation("sdpa")
    other.set_attn_implementation("sdpa")
    with torch.no_grad():
        return torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)


def test_a_folder_is_loaded_as_it_is(saved: Path) -> None:
    built = build(HFModelConfig(name=str(saved)), layout=Layout.packed)
    assert same_logits(built.model, build_family("llama"))
    assert built.backend == "document_sdpa"
    half = build(HFModelConfig(name=str(saved), dtype=Dtype.bfloat16))
    assert half.model.dtype == torch.bfloat16
    assert half.model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3_moe", "qwen2_vl"])
def test_families_are_loaded_by_what_their_configuration_maps_to(family: str, tmp_path: Path) -> None:
    model = build_family(family)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    built = build(HFModelConfig(name=str(tmp_path)))
    assert type(built.model) is type(model)
    assert same_logits(built.model, build_family(family))


def test_an_adapter_is_merged_into_its_base(saved: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(build_family("llama"), PeftLoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(saved)
    adapted.save_pretrained(tmp_path)
    built = build(HFModelConfig(name=str(tmp_path)))
    assert type(built.model).__name__ == "LlamaForCausalLM"
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected, got = adapted.eval()(input_ids=ids).logits, built.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


PATHS = ["/nowhere/at/all", "./nowhere", "~/nowhere", "runs/demo/final", "tests/nowhere", "nowhere/", "a b"]


@pytest.mark.parametrize("name", PATHS)
def test_what_looks_like_a_path_is_never_asked_for_at_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("recipes.models.hf.AutoConfig.from_pretrained", asked)
    with pytest.raises(ModelError) as error:
        build(HFModelConfig(name=name))
    assert (
        str(error.value) == f"model.name={name} does not exist: accepted are a model's folder and a hub id (owner/name)"
    )


@pytest.mark.parametrize("name", ["gpt2", "owner/no-such-model"])
def test_a_hub_id_without_a_hub(name: str) -> None:
    with pytest.raises(ModelError, match=rf"model.name={name}: no such folder, and the hub does not give it") as error:
        build(HFModelConfig(name=name))
    assert "\n" not in str(error.value)


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def edit_config(**changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def drop_a_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "no config.json and no adapter_config.json in this folder"),
        (remove("model.safetensors"), "no file named model.safetensors"),
        (remove("tokenizer_config.json"), "model.tokenizer=<path or hub id> names another"),
        (lambda folder: (folder / "config.json").write_text("{"), "model.name=.*copy: .*config.*JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "model.name=.*copy: "),
        (drop_a_weight, r"lack 1 weights of LlamaForCausalLM \(model.layers.1.mlp.up_proj.weight, …\), which would be"),
        (edit_config(model_type="no_such_type"), "no_such_type"),
        (edit_config(vocab_size=99), "model.name=.*copy: "),
        (
            edit_config(architectures=["LlamaForSequenceClassification"]),
            "holds a LlamaForSequenceClassification: accept",
        ),
        (edit_config(tie_word_embeddings=True), "after loading they are two tensors"),
    ],
)
def test_a_damaged_folder_is_one_line(copy: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(copy)
    if message.startswith("model.tokenizer"):
        (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=message) as error:
        build(HFModelConfig(name=str(copy)))
    assert "\n" not in str(error.value)


def test_other_models_are_refused(tmp_path: Path) -> None:
    transformers.T5Config(d_model=8, num_layers=1, vocab_size=9, architectures=["T5Model"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds a T5Model: accepted are causal"):
        build(HFModelConfig(name=str(tmp_path)))


def test_a_run_folder_hints_at_its_final_model(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "final")
    with pytest.raises(ModelError, match=rf"did you mean {tmp_path / 'final'}"):
        build(HFModelConfig(name=str(tmp_path)))
    assert build(HFModelConfig(name=str(tmp_path / "final"))).vocab_size == 61
    with pytest.raises(ModelError, match=r"config.json is a file: accepted are a model's folder"):
        build(HFModelConfig(name=str(tmp_path / "final" / "config.json")))


def test_another_tokenizer(saved: Path, tmp_path: Path) -> None:
    other = tokenizer()
    other.add_tokens(["extra"])
    other.save_pretrained(tmp_path)
    assert len(build(HFModelConfig(name=str(saved), tokenizer=str(tmp_path))).tokenizer) == 62
    with pytest.raises(ModelError, match=r"model.tokenizer=/nowhere does not exist"):
        build(HFModelConfig(name=str(saved), tokenizer="/nowhere"))


def test_code_that_comes_with_a_model_is_not_run_unless_asked(copy: Path) -> None:
    (copy / "modeling_theirs.py").write_text("raise SystemExit('their code ran')")
    edit_config(
        auto_map={"AutoConfig": "modeling_theirs.C", "AutoModelForCausalLM": "modeling_theirs.M"}, model_type="x"
    )(copy)
    with pytest.raises(ModelError, match=r"with Python code of its own, .* model.trust_remote_code=true alone"):
        build(HFModelConfig(name=str(copy)))
    with pytest.raises(SystemExit, match="their code ran"):
        build(HFModelConfig(name=str(copy), trust_remote_code=True))


def test_backends_of_a_loaded_model_do_not_reach_its_files(saved: Path, tmp_path: Path) -> None:
    build(HFModelConfig(name=str(saved)), backend=Backend.eager).model.save_pretrained(tmp_path)
    assert "eager" not in (tmp_path / "config.json").read_text()
