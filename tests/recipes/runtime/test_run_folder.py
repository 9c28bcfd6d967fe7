"""A used folder is refused or continued, and a refused run leaves a folder as it found it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.closed import ConfigError
from recipes.runtime.run_folder import claim, require_shared_folder

FILES = [
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".hydra/resume-1/config.yaml",
    "run.log",
    "run-rank1.log",
    "metrics.jsonl",
    "checkpoints/step-00000010/COMPLETE",
    "notes/mine.txt",
]


def tree(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")


def write_as_a_run_does(folder, rank):
    """What Hydra and logging write between the claim and the first step."""
    if folder.config_subdir is not None:
        saved = folder.path / folder.config_subdir
        saved.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
            (saved / name).write_text("new\n")
    with (folder.path / ("run.log" if rank == 0 else f"run-rank{rank}.log")).open("a") as log:
        log.write("new\n")


@given(names=st.sets(st.sampled_from(FILES)), rank=st.integers(0, 1))
def test_a_refused_run_leaves_the_folder_as_it_was(tmp_path_factory, names, rank):
    run_dir = tmp_path_factory.mktemp("run")
    fill(run_dir, names)
    before = tree(run_dir)
    is_used = any(name.split("/")[0] in ("metrics.jsonl", "checkpoints", "final") for name in names)
    folder = claim(run_dir, "auto", rank=rank)
    write_as_a_run_does(folder, rank)
    folder.discard()
    after = tree(run_dir)
    if rank == 0 and not is_used:
        # Without results the earlier .hydra describes a run that took no step, and is written over.
        before = {name: content for name, content in before.items() if not name.startswith(".hydra/")}
        after = {name: content for name, content in after.items() if not name.startswith(".hydra/")}
        before.pop(".hydra", None)
        after.pop(".hydra", None)
    assert after == before


def test_a_refused_run_takes_away_the_folders_it_made(tmp_path):
    folder = claim(tmp_path / "outputs" / "sft" / "1", "none")
    write_as_a_run_does(folder, 0)
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_wrote_itself_is_kept(tmp_path):
    folder = claim(tmp_path / "run", "none")
    write_as_a_run_does(folder, 0)
    fill(folder.path, ["data_ledger.json"])
    folder.discard()
    assert list(tree(tmp_path)) == ["run", "run/data_ledger.json"]


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoints/step-00000001/COMPLETE", "final/config.json"])
def test_a_used_folder_is_refused_unless_it_is_resumed(tmp_path, result):
    fill(tmp_path, [result, ".hydra/config.yaml"])
    before = tree(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"hydra\.run\.dir={tmp_path} holds a run already: continue it with checkpoint"
    ):
        claim(tmp_path, "none")
    assert tree(tmp_path) == before
    assert claim(tmp_path, "auto").config_subdir == ".hydra/resume-1"


def test_the_first_configuration_stays_and_resumes_are_numbered(tmp_path):
    names = []
    for resume in ("none", "auto", "auto", str(tmp_path)):
        folder = claim(tmp_path, resume)
        names.append(folder.config_subdir)
        write_as_a_run_does(folder, 0)
        fill(tmp_path, ["metrics.jsonl"])
    assert names == [".hydra", ".hydra/resume-1", ".hydra/resume-2", ".hydra/resume-3"]


def test_a_folder_without_results_is_free(tmp_path):
    fill(tmp_path, [".hydra/config.yaml", "run.log"])
    assert claim(tmp_path, "none").config_subdir == ".hydra"


def test_other_ranks_save_no_configuration(tmp_path):
    assert claim(tmp_path, "none", rank=1).config_subdir is None
    assert claim(tmp_path, "none", config_subdir=None).config_subdir is None


def test_resume_from_a_path(tmp_path):
    fill(tmp_path / "old", ["metrics.jsonl", "checkpoints/step-00000010/COMPLETE"])
    fill(tmp_path / "other", ["metrics.jsonl"])
    checkpoint = str(tmp_path / "old" / "checkpoints" / "step-00000010")
    claim(tmp_path / "new", checkpoint)
    claim(tmp_path / "old", checkpoint)
    claim(tmp_path / "old", str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"holds another run than checkpoint\.resume="):
        claim(tmp_path / "other", checkpoint)
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume=nowhere: .*/nowhere does not exist; accepted are none, auto"
    ):
        claim(tmp_path / "new", "nowhere")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="the folder cannot be made"):
            claim(run_dir, "none")


@pytest.mark.parametrize(
    ("world_size", "run_id", "run_dir", "refused"),
    [
        ("2", None, "outputs/${oc.env:RUN_ID,${now:%Y}}", True),
        ("2", "a", "outputs/${oc.env:RUN_ID,${now:%Y}}", False),
        ("2", None, "outputs/mine", False),
        ("1", None, "outputs/${now:%Y}", False),
    ],
)
def test_ranks_need_one_folder(monkeypatch, world_size, run_id, run_dir, refused):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.delenv("RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("RUN_ID", run_id)
    hydra = OmegaConf.create({"run": {"dir": run_dir}})
    if not refused:
        return require_shared_folder(hydra)
    with pytest.raises(ConfigError, match="2 ranks need one run folder: set the environment variable RUN_ID"):
        require_shared_folder(hydra)
    return None


def test_relative_folders_are_absolute_afterwards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claim(Path("run"), "none").path == tmp_path / "run"
