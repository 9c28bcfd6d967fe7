"""build_model: what options do to a model, whatever it came from."""

import re

import pytest
import torch
from torch import nn

from conf.closed import ConfigError
from conf.schema import Backend, Dtype, Layout, ModelConfig, TinyModelConfig
from recipes.models.dropout import override_dropout, restore_dropout
from recipes.models.errors import ModelError
from recipes.models.gradients import assert_gradients_reach
from recipes.models.scoring import base_of
from tests.recipes.models.families import (
    FAMILIES,
    MROPE,
    build,
    build_family,
    collate,
    documents,
    family_config,
    text_model,
    tokenizer,
)

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    states = [build(TinyModelConfig(**TINY), seed=seed).scoring.state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    first, same, other = (torch.cat([t.flatten() for t in state.values()]) for state in states)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_tiny_has_the_tokens_of_its_tokenizer() -> None:
    built = build(TinyModelConfig(**TINY))
    assert built.vocab_size == len(built.tokenizer)
    assert built.max_positions is None
    assert built.scoring.training
    assert built.model.training
    with pytest.raises(ModelError, match=r"model.tokenizer=/nowhere does not exist"):
        build(TinyModelConfig(**TINY, tokenizer="/nowhere"))


def test_targets_outside_of_the_allowed_modules() -> None:
    with pytest.raises(ConfigError, match=r"model._target_"):
        build(ModelConfig(_target_="os.system"))
    with pytest.raises(ConfigError, match=r"model._target_=tests"):
        build(family_config("gpt2"), allow_targets=[])
    assert build(family_config("gpt2")).max_positions == 64


@pytest.mark.parametrize("dtype", Dtype)
def test_dtype_is_that_of_parameters_and_not_of_rotary_frequencies(dtype: Dtype) -> None:
    built = build(family_config("llama", dtype=dtype))
    wanted = getattr(torch, dtype.value)
    assert {p.dtype for p in built.model.parameters()} == {wanted}
    assert {b.dtype for b in built.model.buffers()} == {torch.float32}
    assert built.model.config.dtype == wanted


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2_vl", "granite"])
def test_dropout_is_overridden_everywhere(family: str) -> None:
    model = build_family(family)
    found = override_dropout(model, model.config, 0.25)
    assert found
    text = model.config.get_text_config()
    names = {name for _, name in found}
    assert all(getattr(text, name) in (0.25, 0.0) for name in names if hasattr(text, name))
    assert all(module.p == 0.25 for module in model.modules() if isinstance(module, nn.Dropout))
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                assert value == 0.25, f"{type(module).__name__}.{name}"
    again = build_family(family).config
    restore_dropout(model.config, found)
    assert model.config.to_dict() == again.to_dict()


def test_the_default_makes_training_and_evaluation_equal() -> None:
    for family in ("gpt2", "opt"):  # 0.1 in their checkpoints, in attention too
        built = build(family_config(family))
        batch = collate(documents(), packed=False)
        targets, selected = batch["input_ids"], batch["attention_mask"].bool()
        first = built.scoring(batch, targets, selected).logprobs
        assert torch.equal(first, built.scoring.eval()(batch, targets, selected).logprobs)
    dropped = build(family_config("gpt2", dropout=0.3))
    assert not torch.equal(first[:1], dropped.scoring(batch, targets, selected).logprobs[:1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen2_vl"])
def test_added_tokens_grow_the_embedding_and_stay_tied(family: str) -> None:
    plain = build(family_config(family))
    built = build(family_config(family, added_tokens=["<a>", "<b>", "t5"]))
    assert built.vocab_size == plain.vocab_size + 2
    assert built.tokenizer.convert_tokens_to_ids(["<a>", "<b>", "t5"]) == [61, 62, 5]
    assert built.tokenizer("t3<a>t4")["input_ids"] == [0, 61, 0] or built.tokenizer("<a>")["input_ids"] == [61]
    for key, old in plain.scoring.state_dict().items():
        assert torch.equal(built.scoring.state_dict()[key][: len(old)], old), key
    base = base_of(built.model)
    is_tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert is_tied == bool(base.config.tie_word_embeddings)


def test_the_embedding_is_never_made_smaller_than_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "wide", _wide)
    built = build(family_config("wide", added_tokens=["<a>"]))
    assert built.vocab_size == 99
    assert len(built.tokenizer) == 62


def _wide() -> nn.Module:
    model = FAMILIES["llama"]()
    model.resize_token_embeddings(99)
    return model


def test_a_head_that_has_come_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn() -> nn.Module:
        model = FAMILIES["gpt2"]()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    monkeypatch.setitem(FAMILIES, "torn", torn)
    with pytest.raises(ModelError, match=r"tie_word_embeddings.*after loading they are two tensors"):
        build(family_config("torn"))


def test_tokens_that_share_the_padding_id_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "padded", lambda: text_model("Llama", pad_token_id=1))
    built = build(family_config("padded"))
    batch = collate([[1, 5, 1, 6]], divisible=None, packed=False)
    built.scoring(batch, batch["input_ids"], batch["attention_mask"].bool()).logprobs.sum().backward()
    assert base_of(built.model).get_input_embeddings().weight.grad[1].any()


def test_generation_gets_a_padding_id_and_the_tokenizer_stays_as_it_is() -> None:
    built = build(family_config("llama"))
    assert built.model.generation_config.pad_token_id == built.model.generation_config.eos_token_id == 2
    assert built.tokenizer.pad_token is None
    assert tokenizer().pad_token is None


@pytest.mark.parametrize("family", MROPE)
def test_parts_without_text_are_frozen_and_everything_else_gets_a_gradient(family: str) -> None:
    built = build(family_config(family), layout=Layout.packed)
    assert "model.visual is frozen: text does not reach it" in built.notes
    batch = collate(documents())
    built.scoring(batch, batch["input_ids"], torch.ones_like(batch["input_ids"]).bool()).logprobs.sum().backward()
    assert_gradients_reach(built.scoring)


def test_tensors_that_the_loss_does_not_reach_are_named() -> None:
    built = build(family_config("llama"))
    built.scoring.extra = nn.Parameter(torch.zeros(1))
    batch = collate(documents())
    built.scoring(batch, batch["input_ids"], torch.ones_like(batch["input_ids"]).bool()).logprobs.sum().backward()
    with pytest.raises(ModelError, match=re.escape("1 of 22 trainable tensors got no gradient")) as error:
        assert_gradients_reach(built.scoring)
    assert ": extra. Freeze" in str(error.value)
    built.scoring.requires_grad_(False)
    with pytest.raises(ModelError, match="no tensor of the model is trainable"):
        assert_gradients_reach(built.scoring)


def test_checkpointing_where_the_model_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"model.gradient_checkpointing=true: LlamaForCausalLM does not support"):
        build(family_config("llama", gradient_checkpointing=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_layers_keep_documents_apart_without_compiling_again_and_again(family: str) -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    plain = build(family_config(family), layout=Layout.packed, backend=Backend.document_sdpa)
    built = build(family_config(family, compile=True), layout=Layout.packed)
    counters.clear()
    graphs = []
    for lengths in ((5, 7, 3), (9, 2, 6, 4), (8, 8), (3, 1, 1, 2, 6), (20, 3), (7, 7, 7)):
        batch = collate(documents(lengths))
        selected = torch.ones_like(batch["input_ids"]).bool()
        results = []
        for model in (plain, built):
            model.scoring.zero_grad()
            logprobs = model.scoring(batch, batch["input_ids"], selected).logprobs
            logprobs.sum().backward()
            results.append((logprobs.detach(), [p.grad for p in model.scoring.parameters()]))
        torch.testing.assert_close(*(r[0] for r in results), rtol=0, atol=1e-4)
        for got, expected in zip(results[1][1], results[0][1]):
            assert (got - expected).norm() <= 1e-4 * max(1.0, float(expected.norm()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2] == graphs[-1], graphs
