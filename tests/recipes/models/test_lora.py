"""Adapters: what is trained, what is refused, and gradients under checkpointing."""

import pytest
import torch

from conf.schema import LoraConfig, LoraExport, TinyModelConfig
from recipes.models.build import LanguageModel
from recipes.models.errors import ModelError
from recipes.models.gradients import assert_gradients_reach
from recipes.models.scoring import base_of
from tests.recipes.models.families import build, collate, documents, family_config


def trainable(built: LanguageModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in built.scoring.named_parameters() if p.requires_grad}


def gradients(built: LanguageModel) -> dict[str, torch.Tensor]:
    batch = collate(documents())
    selected = torch.ones_like(batch["input_ids"]).bool()
    built.scoring(batch, batch["input_ids"], selected).logprobs.sum().backward()
    return {name: p.grad for name, p in trainable(built).items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen2_5_vl", "qwen3_moe"])
def test_adapters_alone_are_trained_on_every_linear_layer_but_the_head(family: str) -> None:
    built = build(family_config(family, lora=LoraConfig(rank=2)))
    names = trainable(built)
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert not any("lm_head" in name or "visual" in name for name in names)
    linear = {"llama": 7, "gpt2": 4, "gemma3": 7, "qwen2_5_vl": 7, "qwen3_moe": 4}[family]  # a layer, of two
    assert len(names) == 2 * 2 * linear
    assert built.scoring.head is not None


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
def test_checkpointing_changes_no_gradient_and_reaches_every_second_matrix(family: str) -> None:
    results = []
    for checkpointing in (False, True):
        built = build(family_config(family, lora=LoraConfig(rank=2), gradient_checkpointing=checkpointing))
        results.append(gradients(built))
        assert_gradients_reach(built.scoring)
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name
        assert bool(gradient.any()) == (".lora_B." in name), name


def test_adapters_that_are_cut_off_are_found() -> None:
    built = build(family_config("llama", lora=LoraConfig(rank=2)))
    gradients(built)
    for name, parameter in trainable(built).items():
        if ".lora_B." in name:
            parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ModelError, match="all 14 lora_B tensors got a gradient of exact zeros"):
        assert_gradients_reach(built.scoring)
    next(iter(trainable(built).values())).grad = None
    with pytest.raises(ModelError, match="1 of 28 trainable tensors got no gradient"):
        assert_gradients_reach(built.scoring)


def test_options_reach_the_adapters() -> None:
    lora = LoraConfig(rank=3, alpha=12.0, dropout=0.5, target_modules=["q_proj", "mlp.down_proj"])
    built = build(family_config("llama", lora=lora))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(built)} == {"q_proj", "down_proj"}
    layer = base_of(built.model).model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 4.0
    assert layer.lora_dropout["default"].p == 0.5
    assert layer.lora_A["default"].weight.shape == (3, 16)


def test_the_seed_decides_the_first_matrices() -> None:
    config = family_config("llama", lora=LoraConfig(rank=2))
    first, same, other = (
        next(p for n, p in build(config, seed=seed).scoring.named_parameters() if ".lora_A." in n) for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("modules", [["nope"], ["q_proj", "q_pro"]])
def test_unknown_modules_are_refused_with_those_there_are(modules: list[str]) -> None:
    message = (
        f"model.lora.target_modules: LlamaForCausalLM has no module {modules[-1]}; it has down_proj, gate_proj, "
        "k_proj, o_proj, q_proj, up_proj, v_proj (or all-linear)"
    )
    with pytest.raises(ModelError) as error:
        build(family_config("llama", lora=LoraConfig(rank=2, target_modules=modules)))
    assert str(error.value) == message


@pytest.mark.parametrize("module", ["lm_head", "wte"])
def test_a_tied_head_gets_no_adapter(module: str) -> None:
    with pytest.raises(ModelError, match=f"{module} is one tensor with the embedding or the head of GPT2LMHeadModel"):
        build(family_config("gpt2", lora=LoraConfig(rank=2, target_modules=["c_attn", module])))


def test_an_adapter_on_an_untied_head_is_scored_by_full_logits() -> None:
    built = build(family_config("llama", lora=LoraConfig(rank=2, target_modules=["q_proj", "lm_head"])))
    assert built.scoring.head is None
    assert "full logits" in built.notes[-1]
    assert all(gradient is not None for gradient in gradients(built).values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_of_added_tokens_are_trained_beside_the_adapters(family: str) -> None:
    built = build(family_config(family, added_tokens=["<a>", "<b>"], lora=LoraConfig(rank=2)))
    names = [name for name in trainable(built) if "trainable_tokens_delta" in name]
    assert len(names) == (1 if family == "gpt2" else 2)  # a tied head has the same rows
    batch = collate([[5, 61, 62, 7]], divisible=None)
    built.scoring(batch, batch["input_ids"], torch.ones(1, 4).bool()).logprobs.sum().backward()
    assert_gradients_reach(built.scoring)
    assert all(trainable(built)[name].grad.any() for name in names)


def test_adapters_that_could_not_be_loaded_again_are_refused() -> None:
    adapter = LoraConfig(rank=2, export=LoraExport.adapter)
    with pytest.raises(ModelError, match=r"model.lora.export=adapter with model.added_tokens: .*export=merged"):
        build(family_config("llama", added_tokens=["<a>"], lora=adapter))
    with pytest.raises(ModelError, match=r"this model has no model.name; use model.lora.export=merged"):
        build(TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, lora=adapter))
