"""What is wrong before the first step: exit code 2, at most three lines that name it, and nothing left behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# name -> (text of the data file, overrides, parts of the message)
WRONG: dict[str, tuple[str | None, list[str], list[str]]] = {
    "missing file": (None, [], ["rows.jsonl", "no such file or folder"]),
    "malformed line": (json.dumps(GOOD) + '\n{"messages": [\n', [], ["rows.jsonl:2", "malformed JSON"]),
    "no object": ("[1, 2]\n", [], ["rows.jsonl:1", "list"]),
    "wrong type": (json.dumps({"messages": "Hi"}) + "\n", [], ["rows.jsonl:1", "messages"]),
    "empty conversation": (json.dumps({"messages": []}) + "\n", [], ["rows.jsonl:1", "messages"]),
    "unknown role": (json.dumps(chat(("user", "Hi"), ("narrator", "x"))) + "\n", [], ["rows.jsonl:1", "narrator"]),
    "no assistant": (json.dumps(chat(("user", "Hi"))) + "\n", [], ["rows.jsonl:1", "assistant"]),
    "all masked": (json.dumps({"tokens": [5, 6, 7], "weights": [1, 0, 0]}) + "\n", [], ["no_target"]),
    "beyond the vocabulary": (json.dumps({"tokens": [5, 99_999]}) + "\n", [], ["rows.jsonl:1", "99999"]),
    "weights of another length": (
        json.dumps({"tokens": [5, 6], "weights": [1]}) + "\n",
        [],
        ["rows.jsonl:1", "weights"],
    ),
    "over-long": (
        json.dumps({"text": "word " * 50}) + "\n",
        ["data.max_length=8"],
        ["rows.jsonl:1", "data.max_length"],
    ),
    "empty data set": ("", [], ["rows.jsonl", "no rows"]),
    "mask without meaning": (
        json.dumps({"text": "a b"}) + "\n",
        ["data.mask=assistant"],
        ["rows.jsonl:1", "data.mask"],
    ),
    "missing template file": (json.dumps(GOOD) + "\n", ["data.chat_template=nowhere.jinja"], ["nowhere.jinja"]),
    "missing tokenizer": (json.dumps(GOOD) + "\n", ["model.tokenizer=./nowhere"], ["nowhere"]),
    "unsound backend": (
        json.dumps(GOOD) + "\n",
        ["attention.backend=flex_attention"],
        ["attention.backend=flex_attention"],
    ),
    "score of another module": (
        json.dumps(GOOD) + "\n",
        ["eval.score=os.system"],
        ["eval.score=os.system", "allow_targets"],
    ),
    "misspelt key": (json.dumps(GOOD) + "\n", ["optim.lrr=1"], ["optim.lrr", "optim.lr"]),
    "added key": (json.dumps(GOOD) + "\n", ["+optim.lr=1"], ["optim.lr"]),
    "wrong kind of value": (json.dumps(GOOD) + "\n", ["optim.lr=abc"], ["optim.lr", "abc"]),
    "objective that is never measured": (
        json.dumps(GOOD) + "\n",
        ["objective.metric=eval/loss", "eval.every_steps=0"],
        ["objective.metric=eval/loss", "never measured"],
    ),
    "misspelt objective": (json.dumps(GOOD) + "\n", ["objective.metric=train/los"], ["did you mean train/loss?"]),
    "padded with xdoc": (
        json.dumps(GOOD) + "\n",
        ["collate=padded", "attention=xdoc"],
        ["attention=xdoc", "collate=padded"],
    ),
    "nothing left to train": (json.dumps(GOOD) + "\n", ["data.eval_fraction=0.5"], ["data.eval_fraction"]),
    "resume from nowhere": (json.dumps(GOOD) + "\n", ["checkpoint.resume=nowhere"], ["checkpoint.resume=nowhere"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named_and_leaves_nothing(
    name: str, sft: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, overrides, parts = WRONG[name]
    rows = tmp_path / "rows.jsonl"
    if text is not None:
        rows.write_text(text)
    code = sft(tmp_path / "run", f"data.path={rows}", *overrides)
    error = capfd.readouterr().err
    assert code == 2, error
    lines = error.strip().splitlines()
    assert 1 <= len(lines) <= 3, error
    for part in parts:
        assert part in error
    assert not (tmp_path / "run").exists()


def test_a_template_that_tells_no_turn_apart_is_refused(
    sft: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n")
    # Reversed order: no prefix of the conversation is a prefix of its text.
    template = tmp_path / "reversed.jinja"
    template.write_text("{% for m in messages|reverse %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    options = (f"data.path={tmp_path / 'rows.jsonl'}", f"data.chat_template={template}")
    assert sft(tmp_path / "run", *options) == 2
    error = capfd.readouterr().err
    assert "rows.jsonl:1" in error
    assert "reversed.jinja" in error
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_or_format_is_refused(
    sft: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sft(tmp_path / "run", "checkpoint.every_steps=6") == 0
    marker = tmp_path / "run/checkpoints/step-00000006/COMPLETE"
    capfd.readouterr()
    resume = ("checkpoint.resume=auto", "checkpoint.every_steps=6", "train.max_steps=9")
    assert sft(tmp_path / "run", *resume, "model.hidden_size=64") == 2
    assert "model.hidden_size=64" in capfd.readouterr().err
    marker.write_text('{"format_version": 2, "step": 6}')
    assert sft(tmp_path / "run", *resume) == 2
    assert "checkpoint format 2; this version reads format 1" in capfd.readouterr().err
    assert sft(tmp_path / "run", "checkpoint.resume=none") == 2
    assert "holds a run already" in capfd.readouterr().err
