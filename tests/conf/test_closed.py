"""Nothing undeclared passes, and what is refused is named with the nearest valid name."""

import pytest
from hydra import compose, initialize_config_module
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

from conf import schema
from conf.closed import ConfigError, check_target, field_keys, nearest, to_config, unknown_key


def composed(*overrides):
    with initialize_config_module("conf", version_base="1.3", job_name="sft"):
        return compose("sft", list(overrides))


DEMO = composed()
KNOWN = [key for key in field_keys(DEMO) if not key.startswith("extras")]
GROUPS = sorted({key.rpartition(".")[0] for key in KNOWN if "." in key} | {""})


@given(st.sampled_from(KNOWN), st.data())
def test_a_doubled_letter_suggests_the_key_that_was_meant(key, data):
    place = data.draw(st.integers(len(key.rpartition(".")[0]) + bool("." in key), len(key) - 1))
    typo = key[:place] + key[place] + key[place:]
    assert nearest(typo, KNOWN) == key
    assert unknown_key(typo, KNOWN) == f"unknown key {typo}, did you mean {key}?"


@given(
    st.lists(st.tuples(st.sampled_from(GROUPS), st.from_regex(r"[a-z]{3,8}_", fullmatch=True)), min_size=1, max_size=3)
)
def test_undeclared_keys_are_all_named_at_every_level(added):
    cfg = DEMO.copy()
    names = {f"{group}.{name}".lstrip(".") for group, name in added}
    with open_dict(cfg):
        for name in names:
            OmegaConf.update(cfg, name, 1, force_add=True)
    with pytest.raises(ConfigError) as caught:
        to_config(cfg)
    assert all(f"unknown key {name}" in str(caught.value) for name in names)


def test_a_root_without_a_schema_is_refused():
    with pytest.raises(ConfigError, match="not typed: its defaults list must begin with a schema"):
        to_config(OmegaConf.create({"optim": {"lr": 1.0}}))


def test_missing_values_are_named():
    with pytest.raises(ConfigError, match=r"^data\.path is required: give data\.path=<value>$"):
        to_config(composed("data=files"))


@given(st.sampled_from(["os.system", "builtins.eval", "torchx.nn.Linear", "recipesx.sft.main", "torch", ""]))
def test_targets_outside_the_allowed_modules_are_refused(target):
    with pytest.raises(ConfigError, match="a target must lie in one of the modules transformers, torch, peft, datum"):
        check_target("loss._target_", target)


def test_allow_targets_adds_a_module_and_what_is_inside_it():
    check_target("loss._target_", "mine.losses.Best", ["mine"])
    check_target("loss._target_", "mine.losses.Best", ["mine.losses"])
    with pytest.raises(ConfigError, match=r"allow_targets=\[mine\]"):
        check_target("loss._target_", "mine.lossesx.Best", ["mine.losses"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["loss._target_=os.system"], "loss._target_"),
        (["model._target_=os.system"], "model._target_"),
        (["eval.score=os.system"], "eval.score"),
    ],
)
def test_every_dotted_name_is_held_to_the_rule(overrides, key):
    with pytest.raises(ConfigError, match=rf"^{key}=os\.system: a target must lie in"):
        to_config(composed(*overrides))
    assert to_config(composed(*overrides, "allow_targets=[os]")).allow_targets == ["os"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: schema.OptimConfig(lr=0.0), "optim.lr=0.0: accepted are finite numbers above 0"),
        (lambda: schema.OptimConfig(lr=float("nan")), "optim.lr=nan: accepted are finite numbers above 0"),
        (lambda: schema.OptimConfig(weight_decay=float("inf")), "optim.weight_decay=inf: accepted are finite numbers"),
        (lambda: schema.OptimConfig(beta2=1.0), r"optim.beta2=1.0: accepted are numbers from 0 to 1 \(1 excluded\)"),
        (lambda: schema.TrainConfig(max_steps=0), "train.max_steps=0: accepted are whole numbers from 1"),
        (lambda: schema.TrainConfig(max_steps=5, epochs=2), "train.max_steps=null to train for whole epochs"),
        (lambda: schema.TrainConfig(grad_clip=float("nan")), "train.grad_clip=nan: accepted are finite numbers from 0"),
        (lambda: schema.ModelConfig(dropout=1.0), "model.dropout=1.0"),
        (lambda: schema.LoraConfig(rank=-1), "model.lora.rank=-1: accepted are whole numbers from 0"),
        (lambda: schema.LoraConfig(target_modules=3), "accepted are all-linear or a list of module names"),
        (lambda: schema.TinyModelConfig(hidden_size=130), "each must be divisible by the next"),
        (lambda: schema.LossConfig(aggregation=schema.Aggregation.constant), "set both or neither"),
        (lambda: schema.LossConfig(max_tokens=3), "set both or neither"),
        (lambda: schema.CollateConfig(layout=schema.Layout.padded, max_tokens=9), "a token budget belongs to"),
        (lambda: schema.SchedulerConfig(name="wsd"), "choose another schedule by scheduler=<name>"),
        (lambda: schema.DecayingSchedulerConfig(name="wsd"), "accepted are linear, cosine"),
        (lambda: schema.WSDSchedulerConfig(name="wsd", decay_fraction=1.1), "accepted are numbers from 0 to 1"),
        (lambda: schema.WandbConfig(name="wandb", mode="off"), "accepted are online, offline, disabled"),
        (lambda: schema.LoggerConfig(name="mlflow"), "choose another tracker by logger=<name>"),
        (lambda: schema.DataConfig(path="a", eval_path="b", eval_fraction=0.1), "choose one source of held-out rows"),
        (lambda: schema.HubDataConfig(path="a", eval_split="b", eval_fraction=0.1), "choose one"),
        (lambda: schema.LaunchConfig(num_processes=0), "launch.num_processes=0: accepted are whole numbers from 1"),
    ],
)
def test_each_range_and_illegal_combination_has_its_message(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "weight", "x"]), inner),
    )
)
def test_data_path_is_a_path_or_a_list_of_weighted_paths(value):
    def is_entry(entry):
        if isinstance(entry, dict):
            weight = entry.get("weight", 1)
            number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")
            return number and set(entry) <= {"path", "weight"} and isinstance(entry.get("path"), str)
        return isinstance(entry, str) and entry != ""

    legal = (
        all(map(is_entry, value)) and value != []
        if isinstance(value, list)
        else isinstance(value, str) and is_entry(value)
    )
    if legal:
        schema.DataConfig(path=value)
    else:
        with pytest.raises(ConfigError, match=r"^data\.path=.*accepted are a path, or a list"):
            schema.DataConfig(path=value)
