"""Names of code in the configuration become objects only from allowed modules, with exactly the options they take."""

import sys
from dataclasses import dataclass, field

import pytest

from conf.closed import ConfigError
from conf.schema import Aggregation, CrossEntropyConfig
from recipes.runtime.build import instantiate, locate

MODULE = """
import os
from collections import Counter
LIMIT = 3
class Loss:
    def __init__(self, aggregation, max_tokens=None):
        self.aggregation, self.max_tokens = aggregation, max_tokens
    @classmethod
    def make(cls, aggregation, max_tokens):
        return cls(aggregation, max_tokens)
def no_options():
    return 1
"""


@pytest.fixture(autouse=True)
def _their_package(tmp_path, monkeypatch):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mod.py").write_text(MODULE)
    (package / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        del sys.modules[name]


def test_a_loss_of_ones_own():
    config = CrossEntropyConfig(_target_="theirs.mod.Loss", aggregation=Aggregation.sequence)
    loss = instantiate(config, ["theirs"], key="loss")
    assert (type(loss).__name__, loss.aggregation, loss.max_tokens) == ("Loss", "sequence", None)  # enums by value
    config._target_ = "theirs.mod.Loss.make"
    assert instantiate(config, ["theirs"]).aggregation == "sequence"


def test_nested_groups_are_passed_as_they_are():
    @dataclass
    class Inner:
        x: int = 1

    @dataclass
    class Outer:
        _target_: str = "theirs.mod.Loss"
        aggregation: Inner = field(default_factory=Inner)

    assert instantiate(Outer(), ["theirs"]).aggregation == Inner(1)


@pytest.mark.parametrize(
    ("target", "allowed", "message"),
    [
        (
            "theirs.mod.Loss",
            [],
            r"x=theirs\.mod\.Loss: a target must lie in .*; to trust another one give allow_targets=\[theirs\]",
        ),
        ("theirs.mod.os.system", ["theirs"], "a target must lie in"),
        ("theirs.mod.Counter", ["theirs"], r"x=collections\.Counter: a target must lie in"),
        ("theirs.mod.LIMIT", ["theirs"], "x=theirs.mod.LIMIT is a int: accepted are classes and functions"),
        ("theirs.mod", ["theirs"], "x=theirs.mod (cannot be imported|is a module: accepted are classes and functions)"),
        ("theirs.mod.Los", ["theirs"], "cannot be imported: AttributeError: .*has no attribute 'Los'"),
        ("theirs.nothing.Loss", ["theirs"], "cannot be imported: .*theirs.*nothing"),
        ("theirs.broken.Loss", ["theirs"], "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("absent.mod.Loss", ["absent"], "ModuleNotFoundError: No module named 'absent'"),
    ],
)
def test_what_cannot_be_used_is_refused(target, allowed, message):
    with pytest.raises(ConfigError, match=message):
        locate(target, allowed, key="x")


def test_options_are_bound_before_the_call():
    config = CrossEntropyConfig(_target_="theirs.mod.no_options")
    with pytest.raises(
        ConfigError, match=r"loss: theirs\.mod\.no_options\(\) does not take the options aggregation, max_tokens"
    ):
        instantiate(config, ["theirs"], key="loss")
