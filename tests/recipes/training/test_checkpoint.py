"""Checkpoints are whole or absent."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.closed import ConfigError
from conf.schema import OptimConfig
from recipes.training import checkpoint
from recipes.training.checkpoint import (
    RunState,
    SaveError,
    complete_checkpoints,
    discard_later,
    find_resume,
    load_checkpoint,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from recipes.training.optim import build_optimizer


class Toy(nn.Module):
    def __init__(self, width: int = 4, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.head = nn.Linear(width, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def trained(steps: int = 2, **options) -> tuple[Toy, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Toy(**options)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.1))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: Toy, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([1, 2, 5])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("tied", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model, optimizer = trained(3, tied=tied)
    model.seen += 7
    path = save_checkpoint(tmp_path, model, optimizer, RunState(step=3, skipped=1, loader={"samples": 12}))
    other, other_optimizer = trained(0, tied=tied)
    load_checkpoint(path, other, other_optimizer)
    assert read_state(path) == RunState(step=3, skipped=1, loader={"samples": 12})
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not tied or other.head.weight is other.embed.weight


def test_frozen_parameters_are_not_stored(tmp_path: Path) -> None:
    model = Toy(width=64)
    model.embed.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig())
    path = save_checkpoint(tmp_path, model, optimizer, RunState(step=1))
    other = Toy(width=64)
    other.embed.weight.requires_grad_(False)
    before = other.embed.weight.clone()
    load_checkpoint(path, other, build_optimizer(other, OptimConfig()))
    assert torch.equal(other.embed.weight, before)
    assert torch.equal(other.head.weight, model.head.weight)


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(), RunState(step=2))
    with pytest.raises(ConfigError, match=r"another model: model.embed.weight is \[6, 4\], here \[6, 8\]"):
        load_checkpoint(path, *trained(0, width=8))


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(), RunState(step=2))
    (path / "COMPLETE").write_text('{"format_version": 99, "step": 2}')
    with pytest.raises(ConfigError, match="checkpoint format 99; this version reads format 1"):
        read_state(path)


def test_unmarked_folder_is_skipped_and_its_step_can_be_saved_again(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, RunState(step=1))
    half = save_checkpoint(tmp_path, model, optimizer, RunState(step=2))
    (half / "COMPLETE").unlink()
    assert find_resume("auto", tmp_path) == [tmp_path / "checkpoints/step-00000001"]
    again = save_checkpoint(tmp_path, model, optimizer, RunState(step=2))
    assert find_resume("auto", tmp_path)[0] == again
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


def test_failure_while_saving_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    good = save_checkpoint(tmp_path, model, optimizer, RunState(step=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    with pytest.raises(
        SaveError,
        match=r"could not write .*step-00000002: .*No space left on device.*earlier checkpoints are untouched",
    ):
        save_checkpoint(tmp_path, model, optimizer, RunState(step=2))
    assert complete_checkpoints(tmp_path) == [good]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_non_finite_weights_are_never_published(tmp_path: Path) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(SaveError, match=r"not finite \(head.weight\)"):
        save_checkpoint(tmp_path, model, optimizer, RunState(step=1))
    assert complete_checkpoints(tmp_path) == []


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    model, optimizer = trained()
    for n in (1, 2, 3, 4, 5):
        save_checkpoint(tmp_path, model, optimizer, RunState(step=n))
    prune_checkpoints(tmp_path, keep=2, best_step=2)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]


def test_discard_later_names_what_it_removes(tmp_path: Path) -> None:
    model, optimizer = trained()
    for n in (1, 2, 3):
        save_checkpoint(tmp_path, model, optimizer, RunState(step=n))
    (tmp_path / "checkpoints/step-00000003/COMPLETE").unlink()
    (tmp_path / "checkpoints/.tmp-step-00000004").mkdir()
    assert discard_later(tmp_path, 1) == (["step-00000002"], ["step-00000003"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_resume_accepts_a_checkpoint_a_run_or_its_checkpoints_folder(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(), RunState(step=2))
    elsewhere = tmp_path / "other"
    for named in (path, tmp_path, tmp_path / "checkpoints"):
        assert find_resume(str(named), elsewhere) == [path]
    assert find_resume("none", tmp_path) == []
    assert find_resume("auto", elsewhere) == []
    with pytest.raises(ConfigError, match="no such folder"):
        find_resume(str(tmp_path / "nope"), elsewhere)
    (path / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        find_resume(str(tmp_path), elsewhere)


def test_publishing_over_a_complete_folder_replaces_it(tmp_path: Path) -> None:
    for text in ("one", "two"):
        aside = tmp_path / ".tmp-final"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        (aside / "file").write_text(text)
        checkpoint.publish(aside, tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final/file").read_text() == "two"


def test_only_tensors_are_stored(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(), RunState(step=2))
    metadata = checkpoint.dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    assert {type(item).__name__ for item in metadata.values()} == {"TensorStorageMetadata"}
    assert json.loads((path / "COMPLETE").read_text()) == {"format_version": 1, "step": 2}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, size: int) -> None:
    path = save_checkpoint(tmp_path, *trained(), RunState(step=2))
    with (path / "state" / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ConfigError, match=r"step-00000002 is damaged \(.*resume from another checkpoint"):
        load_checkpoint(path, *trained(0))
