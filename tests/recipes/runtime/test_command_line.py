"""The configuration is closed: a mistake is refused with exit code 2, is named, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.runtime.entry import run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def mine(tmp_path_factory):
    """A user's folder with mistakes of every kind, and a few files without."""
    folder = tmp_path_factory.mktemp("mine")
    files = {
        "experiment/misspelt": "# @package _global_\noptim:\n  lrr: 1\n",
        "experiment/new_root": "# @package _global_\nspeed: 1\n",
        "experiment/wrong_type": "# @package _global_\noptim:\n  lr: abc\n",
        "experiment/wrong_group": "# @package _global_\ndefaults:\n  - override /loss: pppo\n",
        "experiment/unresolvable": "# @package _global_\noptim:\n  lr: ${nothing}\n",
        "experiment/no_yaml": "# @package _global_\noptim: [\n",
        "experiment/scalar_group": "# @package _global_\noptim: 3\n",
        "experiment/fine": "# @package _global_\noptim:\n  lr: 0.5\nextras:\n  note: {who: me}\n",
        "experiment/no_header": "optim:\n  lr: 0.5\n",
        "experiment/of_hydra": "# @package _global_\nhydra:\n  run:\n    foo: 1\n",
        "optim/plain": "lr: 0.25\n",
        "optim/plain_misspelt": "lrr: 0.25\n",
        "loss/theirs": "defaults: [cross_entropy_schema, _self_]\n_target_: theirs.Loss\n",
        "untyped": "optim:\n  lr: 1\n",
    }
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def never(config, run_dir):
    raise AssertionError("the recipe was started")


def refusal(capfd, argv, code=2):
    """What a run that must be refused before anything is written says."""
    assert run("sft", never, argv) == code
    err = capfd.readouterr().err
    lines = err.splitlines()
    assert 1 <= len(lines) <= 3, err
    assert list(Path.cwd().iterdir()) == []
    return err.strip()


CASES = {
    # unknown keys, at every level and in every way to write them
    "optim.lrr=1e-4": "unknown key optim.lrr, did you mean optim.lr?",
    "+optim.lrr=1e-4": "unknown key optim.lrr, did you mean optim.lr?",
    "++optim.lrr=1e-4": "unknown key optim.lrr, did you mean optim.lr?",
    "~optim.lrr": "unknown key optim.lrr, did you mean optim.lr?",
    "lr=1": "unknown key lr, did you mean optim.lr?",
    "los=cross_entropy": "unknown key los, did you mean loss?",
    "model.lora.rnk=2": "unknown key model.lora.rnk, did you mean model.lora.rank?",
    "loss.clip=3": "unknown key loss.clip; loss has _target_, aggregation, max_tokens",
    "scheduler.decay_fraction=0.1": "unknown key scheduler.decay_fraction",  # of wsd alone
    "optim={lr: 1, foo: 2}": "unknown key optim.foo",
    "optim.lr.x=1": "unknown key optim.lr.x: optim.lr has no keys, it is one value; accepted are finite numbers above",
    "model.added_tokens.x=1": "unknown key model.added_tokens.x: model.added_tokens is a list",
    "model.lora.foo=3": "unknown key model.lora.foo; model.lora has alpha, dropout, export, rank, target_modules",
    "experimnt=x": "unknown key experimnt, did you mean experiment?",
    "+foo=1": "eval, extras, launch, logger, loss",  # not experiment and debug, which are no keys
    "foo.bar=1": "extras, launch, logger",  # not hydra
    "_target_=os.system": "unknown key _target_",
    "optim._target_=os.system": "unknown key optim._target_",
    "new.key=1": "unknown key new",
    "hydra.jobb.name=x": "unknown key hydra.jobb, did you mean hydra.job?",
    "+hydra.run.foo=1": "unknown key hydra.run.foo; hydra.run has dir",
    "++hydra.rn.dir=x": "unknown key hydra.rn.dir, did you mean hydra.run.dir?",
    "+hydra.job.env_set.FOO=1": "unknown key hydra.job.env_set.FOO: further keys in hydra.job.env_set are not",
    # + and ~ on keys that exist
    "+hydra.run.dir=x": "+hydra.run.dir=x: keys are never added; write hydra.run.dir=x",
    "+hydra/launcher=basic": "+hydra/launcher=basic: keys are never added; write hydra/launcher=basic",
    "~hydra.run": "~hydra.run: an option cannot be removed; give it another value, hydra.run=<value>",
    "+experiment@foo=fine": "+experiment@foo=fine: keys are never added; write experiment=fine",
    "+optim.lr=1": "+optim.lr=1: keys are never added; write optim.lr=1",
    "++optim.lr=1": "++optim.lr=1: keys are never added; write optim.lr=1",
    "~optim.lr": "~optim.lr: an option cannot be removed; give it another value, optim.lr=<value>",
    "~logger": "~logger: an option cannot be removed",
    "+experiment=fine": "+experiment=fine: keys are never added; write experiment=fine",
    "+loss=cross_entropy": "+loss=cross_entropy: keys are never added; write loss=cross_entropy",
    "+extras.note=1": "+extras.note=1: keys are never added; write extras.note=1",
    # group options
    "loss=pppo": "loss has no option pppo, did you mean ppo?; the options of loss are cispo, cross_entropy, dapo,",
    "rollout=hf": "this recipe has no group rollout; it belongs to another recipe",
    "experiment=dapo": "this recipe has no group advantage (asked for by 'experiment/dapo')",
    "scheduler=cosin": "scheduler has no option cosin, did you mean cosine?; the options of scheduler are constant,",
    "experiment=nope": "experiment has no option nope",
    "train=null": "train=null: the options of train are default",
    "optim=3": "optim=3: the options of optim are adamw",
    "loss@x=cross_entropy": "loss@x: a group's place in the configuration is fixed; write loss=<option>",
    "experiment=sft_tiny_packed experiment=null": "experiment=null: the options of experiment are",
    "model=tiny_schema": "the options of model are hf, smollm2, tiny, tiny_warm",
    "scheduler=constant_schema": "the options of scheduler are constant, cosine, linear, wsd",
    "data=[demo,files_schema]": "data has no option files_schema",
    # keys that the group option sets
    "collate=packed collate.layout=padded": "collate.layout=padded: collate=packed sets it to packed; choose another",
    "collate.layout=packed": "collate.layout=packed: collate=padded sets it to padded",
    "collate={layout: packed}": "collate.layout=packed: collate=padded sets it to padded",
    "collate=packed attention.scope=xdoc": "attention.scope=xdoc: attention=per_document sets it",
    "positions.axes=mrope": "positions.axes=mrope: positions=rope sets it",
    "scheduler=cosine scheduler.name=linear": "scheduler.name=linear: scheduler=cosine sets it to cosine",
    "collate.layout=${nothing}": "collate.layout: Interpolation key 'nothing' not found",
    # what Hydra allows and a run cannot honour
    "hydra.job.chdir=true": "hydra.job.chdir=true: accepted is false; a run stays in the working directory",
    "-m hydra.job.chdir=true": "hydra.job.chdir=true: accepted is false",
    "hydra.output_subdir=null": "hydra.output_subdir=null: accepted is the name of a folder",
    "-m hydra.output_subdir=null": "hydra.output_subdir=null: accepted is the name of a folder",
    "hydra.searchpath=[file:///nope]": "hydra.searchpath: /nope is not there",
    "hydra/launcher=nope": "hydra/launcher has no option nope",
    # malformed overrides
    "optim.lr": "malformed override 'optim.lr': accepted are key=value and group=option",
    "=3": "malformed override '=3'",
    "a b": "malformed override 'a b'",
    "optim.lr=[1,": "malformed override 'optim.lr=[1,'",
    "optim.lr=1,2": "optim.lr=1,2 has several values: sweep over them with -m",
    "train.seed=range(3)": "train.seed=range(3) has several values: sweep over them with -m",
    # interpolations
    "optim.lr=${nothing}": "optim.lr: Interpolation key 'nothing' not found",
    "optim.lr=${nothing:1}": "optim.lr: Unsupported interpolation type nothing",
    "optim.lr=${train.precision}": "optim.lr",
    "hydra.run.dir=${nothing}": "hydra.run.dir: Interpolation key 'nothing' not found",
    # types
    "optim.lr=abc": "optim.lr=abc: accepted are finite numbers above 0",
    "optim.lr=[1,2]": "optim.lr=[1, 2]: accepted are finite numbers above 0",
    "optim.lr=null": "optim.lr",
    "optim.lr=true": "optim.lr=True: accepted are finite numbers above 0",
    "train.max_steps=1.5": "train.max_steps=1.5: accepted are whole numbers from 1, or null",
    "train.seed=x": "train.seed=x: accepted are whole numbers from 0 to 9223372036854775807",
    "train.seed=-1": "train.seed=-1: accepted are whole numbers from 0 to 9223372036854775807",
    "train.seed=9223372036854775808": "accepted are whole numbers from 0 to 9223372036854775807",
    "eval.max_new_tokens=0": "eval.max_new_tokens=0: accepted are whole numbers from 1",
    "train.precision=fp8": "train.precision=fp8: accepted are fp32, bf16",
    "data.mask=user": "data.mask=user: accepted are assistant, last_assistant, completion, all, or null",
    "model.compile=maybe": "model.compile=maybe: accepted are true, false",
    "allow_targets=os": "allow_targets=os: accepted is a list",
    "extras=3": "extras=3: accepted is a mapping",
    "model.lora=null": "model.lora",
    "data.path=3": "data.path=3: accepted are a path, or a list like",
    "checkpoint.resume=null": "checkpoint.resume",
    # ranges and combinations
    "optim.lr=-1": "optim.lr=-1.0: accepted are finite numbers above 0",
    "optim.lr=nan": "optim.lr=nan: accepted are finite numbers above 0",
    "train.global_batch_size=0": "train.global_batch_size=0: accepted are whole numbers from 1",
    "model.dropout=1": "model.dropout=1.0: accepted are numbers from 0 to 1 (1 excluded)",
    "attention=xdoc": "attention=xdoc with collate=padded: documents share a row only with collate=packed",
    "collate.max_tokens=64": "collate.max_tokens=64 with collate=padded",
    "collate=packed train.microbatch_size=2": "train.microbatch_size=2 with collate=packed",
    "collate=packed collate.max_tokens=8": "data.max_length=",
    "data.eval_fraction=0.1": "data.eval_path and data.eval_fraction are both set",
    "loss.aggregation=constant": "set both or neither",
    "train.epochs=3": "train.epochs=3 with train.max_steps=",
    "scheduler.name=cosine scheduler=wsd": "scheduler.name=cosine: scheduler=wsd sets it to wsd",
    "data=files": "data.path is required: give data.path=<value>",
    "model=hf": "model.name is required: give model.name=<folder or hub id>",
    "optim.lr=???": "optim.lr is required",
    # names of code
    "loss._target_=os.system": "loss._target_=os.system: a target must lie in one of the modules transformers,",
    "eval.score=subprocess.run": "eval.score=subprocess.run: a target must lie in",
    # the run folder
    "checkpoint.resume=nowhere": "accepted are none, auto, and the path of a checkpoint or of a run folder",
    "hydra.run.dir=/dev/null/x": "hydra.run.dir=/dev/null/x: the folder cannot be made",
    # flags
    "--bogus": "unrecognized arguments: --bogus",
    "--cfg jobb": "argument --cfg/-c: invalid choice: 'jobb'",
    "--cfg job --multirun": "only one of --run, --multirun, --cfg, --info and --shell-completion",
    "--config-dir nowhere": "--config-dir=nowhere:",
    "--config-path x": "--config-path is not offered",
    "--config-name nope": "Cannot find primary config 'nope'",
    "--config-name sft_schema": "--config-name=sft_schema is for the defaults list of a file",
    "--resolve": "--resolve belongs to --cfg",
    "--package optim": "--package belongs to --cfg",
    "--cfg job -p optimm": "--package=optimm: unknown key optimm, did you mean optim?",
}
SPACED = {"a b", "optim={lr: 1, foo: 2}", "collate={layout: packed}"}  # one argument that holds a space


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_and_named(case, capfd):
    said = refusal(capfd, [case] if case in SPACED else case.split())
    assert said.startswith("config error: ")
    assert CASES[case] in said


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["experiment=misspelt"], "unknown key optim.lrr, did you mean optim.lr? (in 'experiment/misspelt')"),
        (["experiment=new_root"], "unknown key speed"),
        (["experiment=wrong_type"], "optim.lr=abc: accepted are finite numbers above 0 (in 'experiment/wrong_type')"),
        (["experiment=no_header"], "its first line must be `# @package _global_`"),
        (["experiment=of_hydra"], "unknown key hydra.run.foo; hydra.run has dir (in 'experiment/of_hydra')"),
        (["experiment=wrong_group"], "loss has no option pppo"),
        (["experiment=unresolvable"], "optim.lr: Interpolation key 'nothing' not found"),
        (["experiment=no_yaml"], "while parsing a flow node"),
        (["experiment=scalar_group"], "int is not a subclass of OptimConfig"),
        (["experiment=fin"], "experiment has no option fin, did you mean fine?"),
        (["optim=plain_misspelt"], "unknown key optim.lrr, did you mean optim.lr? (in 'optim/plain_misspelt')"),
        (["loss=theirs"], "allow_targets=[theirs]"),
        (["--config-name", "untyped"], "its defaults list must begin with a schema"),
    ],
)
def test_files_of_ones_own_are_held_to_the_same_rules(argv, expected, mine, capfd):
    assert expected in refusal(capfd, ["--config-dir", str(mine), *argv])


def test_files_of_ones_own_work(mine):
    seen = []
    flags = ["--config-dir", str(mine)]
    assert run("sft", lambda config, run_dir: seen.append(config), [*flags, "experiment=fine"]) == 0
    assert run("sft", lambda config, run_dir: seen.append(config), [*flags, "optim=plain"]) == 0
    assert (seen[0].optim.lr, seen[0].extras) == (0.5, {"note": {"who": "me"}})


def test_flags_may_stand_anywhere(capfd):
    assert run("sft", never, ["optim.lr=1", "--cfg", "job", "train.seed=7"]) == 0
    out, _ = capfd.readouterr()
    assert "lr: 1.0" in out
    assert "seed: 7" in out


def test_what_hydra_offers_to_show_works_and_starts_nothing(capfd):
    for argv, expected in [
        (["--help"], "scheduler: constant"),
        (["--cfg", "job", "-p", "optim", "--resolve"], "# @package optim"),
        (["--cfg", "job", "-p", "train.microbatch_size"], "null"),
        (["--cfg", "hydra", "-p", "hydra.job"], "name: sft"),
        (["--info", "searchpath"], "pkg://conf"),
    ]:
        assert run("sft", never, argv) == 0
        assert expected in capfd.readouterr().out
    assert list(Path.cwd().iterdir()) == []


def test_show_refuses_what_a_run_would_refuse(capfd):
    assert "unknown key optim.lrr" in refusal(capfd, ["--cfg", "job", "+optim.lrr=1"])
    assert "set both or neither" in refusal(capfd, ["--cfg", "job", "loss.aggregation=constant"])
    assert "unknown key optim.lrr" in refusal(capfd, ["--info", "defaults", "optim.lrr=1"])


def test_null_is_what_experiment_and_debug_are_by_default():
    assert run("sft", lambda config, run_dir: None, ["experiment=null", "hydra.run.dir=run", "debug=null"]) == 0
    assert Path("run/.hydra/overrides.yaml").read_text() == "- experiment=null\n- debug=null\n"


def test_option_classes_are_not_offered(capfd, monkeypatch):
    assert run("sft", never, ["--help"]) == 0
    assert "_schema" not in capfd.readouterr().out
    monkeypatch.setenv("COMP_LINE", "sft model=")
    monkeypatch.setenv("COMP_POINT", "10")
    assert run("sft", never, ["-sc", "query=bash"]) == 0
    assert sorted(capfd.readouterr().out.split()) == ["model=hf", "model=smollm2", "model=tiny", "model=tiny_warm"]


def test_only_rank_0_speaks(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("sft", never, ["optim.lrr=1"]) == 2
    assert capfd.readouterr().err == ""


def test_a_stack_trace_comes_on_request(capfd, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run("sft", never, ["optim.lrr=1"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "config error: unknown key optim.lrr, did you mean optim.lr?"


def in_process(*argv):
    """The real command, and whether it imported torch."""
    code = (
        "import sys, recipes.sft\n"
        "try: recipes.sft.main()\n"
        "except SystemExit as stop: code = stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["optim.lrr=1e-4"], 2, "config error: unknown key optim.lrr, did you mean optim.lr?\n"),
        (["+optim.lrr=1e-4"], 2, "config error: unknown key optim.lrr, did you mean optim.lr?\n"),
        (["--cfg", "job", "optim.lr=abc"], 2, "config error: optim.lr=abc: accepted are finite numbers above 0\n"),
        (["--cfg", "job"], 0, ""),
        (
            ["-m", "optim.lr=1,abc"],
            2,
            "config error: optim.lr=abc: accepted are finite numbers above 0 (job optim.lr=abc)\n",
        ),
    ],
)
def test_the_real_command_imports_no_torch_to_refuse_or_show(argv, code, said):
    ended = in_process(*argv)
    assert (ended.returncode, ended.stderr) == (code, said)
    assert list(Path.cwd().iterdir()) == []


def test_keys_complete_by_tab():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COMP_LINE": "sft scheduler=cos", "COMP_POINT": "17"}
    argv = [sys.executable, "-m", "recipes.sft", "-sc", "query=bash"]
    ended = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert ended.stdout.split() == ["scheduler=cosine"]
