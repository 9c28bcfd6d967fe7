"""What a resumed run may change."""

import pytest
import torch

from conf.closed import ConfigError
from recipes.training.environment import describe_environment, environment_changes, plain, require_same_options

SAVED = {
    "optim": {"lr": 0.1},
    "train": {"max_steps": 10, "seed": 0},
    "collate": {"max_tokens": 64, "layout": "packed"},
    "extras": {},
}


def changed(**sections) -> dict:
    return {name: {**values, **sections.get(name, {})} for name, values in SAVED.items()}


def test_listed_options_may_differ() -> None:
    others = {"logger": {"name": "wandb"}, "eval": {"every_steps": 3}, "launch": {"num_processes": 2}}
    for now in (changed(train={"max_steps": 20}, collate={"max_tokens": 128}), SAVED | others):
        assert require_same_options(SAVED, now) is None  # raises otherwise


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("optim", "lr", 0.2), ("train", "seed", 1), ("collate", "layout", "padded"), ("extras", "note", "x")],
)
def test_anything_else_is_named_with_both_values(section: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        require_same_options(SAVED, changed(**{section: {key: value}}))
    before = SAVED[section].get(key)
    assert f"{section}.{key}={value} differs from the checkpoint's {section}.{key}={before}" in str(caught.value)


def test_environment_changes_are_named() -> None:
    now = describe_environment(torch.device("cpu"))
    assert environment_changes(now, now) == []
    assert environment_changes({**now, "threads": 96}, now) == [f"threads 96 -> {torch.get_num_threads()}"]


def test_plain_makes_json() -> None:
    from conf.schema import CollateConfig, Layout

    assert plain(CollateConfig(layout=Layout.packed))["layout"] == "packed"
