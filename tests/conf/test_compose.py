"""Every yaml file composes into typed options, shows how it is used, and is documented."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import conf
from conf import environments, policy, schema
from conf.closed import ConfigError, to_config
from recipes.runtime.build import locate
from scripts import make_config_docs

CONF = Path(conf.__file__).parent
FILES = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra")
REQUIRED = {
    "data/files": ["data.path=rows.jsonl"],
    "data/hub": ["data.path=owner/name"],
    "model/hf": ["model.name=x"],
    "environment/math": ["environment.path=problems.jsonl"],
    "environment/reasoning_gym": ["environment.task=chain_sum"],
    "environment/rows": ["environment.path=rows.jsonl", "environment.rewards={a: {function: recipes.a.b}}"],
}
RECIPES = {"sft": schema.SFTConfig, "grpo": policy.GRPOConfig}
OPTION_CLASSES = [
    cls
    for module in (schema, policy, environments)
    for cls in vars(module).values()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls.__module__ == module.__name__
]


def composed(*overrides: str, recipe: str = "sft"):
    with initialize_config_module("conf", version_base="1.3", job_name=recipe):
        return to_config(compose(recipe, list(overrides)))


def recipe_of(path: Path) -> str:
    """The recipe that the command on top of a file runs."""
    found = re.search(r"python -m recipes\.(\w+)", path.read_text())
    assert found, path
    return found[1]


def overrides_of(path: Path) -> list[str]:
    option = f"{path.parent.name}={path.stem}"
    needs_packing = ["collate=packed"] if option == "attention=xdoc" else []
    return [option, *needs_packing, *REQUIRED.get(f"{path.parent.name}/{path.stem}", [])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_group_file_composes_to_typed_options(path):
    config = composed(*overrides_of(path), recipe=recipe_of(path))
    assert isinstance(config, RECIPES[recipe_of(path)])
    if hasattr(config, path.parent.name):
        assert dataclasses.is_dataclass(getattr(config, path.parent.name))


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_file_begins_with_the_command_that_uses_it(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# python -m recipes.")
    group, option = path.parent.name, path.stem
    if path in FILES and option != "default":
        assert f"{group}={option}" in lines[0]


def test_without_overrides_it_is_the_offline_demo():
    config = composed()
    assert isinstance(config.model, schema.TinyModelConfig)
    assert config.data.path == "pkg://recipes/demo/train.jsonl"
    assert config.data.eval_path == "pkg://recipes/demo/eval.jsonl"


def test_numbers_in_scientific_notation_are_numbers():
    assert composed("optim.lr=1e-5").optim.lr == 1e-5
    assert isinstance(composed().optim.lr, float)  # written 2e-3 in yaml


def test_extras_are_free_and_nested_without_a_plus():
    assert composed("extras.x.y=1", "extras.note=two words").extras == {"x": {"y": 1}, "note": "two words"}


@pytest.mark.parametrize("cls", OPTION_CLASSES, ids=lambda cls: cls.__name__)
def test_every_option_has_a_line_of_help(cls):
    own = [field.name for field in dataclasses.fields(cls) if field.name in vars(cls).get("__annotations__", {})]
    overridden = [name for name in own if name in ("_target_", "name") and cls.__bases__ != (object,)]
    assert [name for name in own if name not in overridden and not make_config_docs.help_of(cls, name)] == []


def test_docs_list_exactly_the_options_there_are():
    assert make_config_docs.PAGE.read_text() == make_config_docs.render(), "run python -m scripts.make_config_docs"


@pytest.mark.parametrize("model", ["tiny", "smollm2", "hf model.name=x"])
def test_every_default_target_imports(model):
    config = composed(*f"model={model}".split())
    for target in (config.model._target_, config.loss._target_, config.eval.score):
        assert callable(locate(target))


@pytest.mark.parametrize("recipe", RECIPES)
def test_composing_imports_no_torch(recipe):
    code = (
        "import sys; from hydra import compose, initialize_config_module; from conf.closed import to_config\n"
        f"with initialize_config_module('conf', version_base='1.3'): to_config(compose('{recipe}'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_tuned_for_a_model_yields_to_a_file_of_ones_own(tmp_path):
    assert (composed().optim.lr, composed().train.max_steps) == (1.5e-3, 800)
    assert composed("model=hf", "model.name=x").optim.lr == 1e-5
    assert composed("optim.lr=0.1", "train.max_steps=3").optim.lr == 0.1
    for group, line in {"optim": "lr: 3e-3", "train": "max_steps: 9"}.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(line)
    config = composed("optim=mine", "train=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert (config.optim.lr, config.optim.beta2, config.train.max_steps) == (3e-3, 0.999, 9)


@pytest.mark.parametrize("option", ["tiny", "smollm2"])
def test_a_name_is_for_models_that_have_one(option):
    with pytest.raises(ConfigError, match=f"model.name=x with model={option}: a folder or hub id belongs to model=hf"):
        composed(f"model={option}", "model.name=x")
