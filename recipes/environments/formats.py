"""Rewards for the form of an answer, to be added with a weight to any environment; and how tagged answers are read.

python -m recipes.grpo 'environment.rewards={form: {function: recipes.environments.formats.answer_tags, weight: 0.2}}'
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["answer_of", "answer_tags", "last_number", "matches"]

_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_ONE_ANSWER_AT_THE_END = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def matches(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the regular expression in the row's `pattern` matches the whole completion (`.` is any character).

    Rows without a `pattern` are judged by `answer_tags`.
    """
    return [
        float(re.fullmatch(row["pattern"], completion, re.DOTALL) is not None)
        if "pattern" in row
        else _is_tagged(completion)
        for completion, row in zip(completions, rows, strict=True)
    ]


def answer_tags(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the completion ends with its only `<answer>…</answer>`; else 0."""
    return [_is_tagged(completion) for completion in completions]


def last_number(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the last number of the completion is the row's `answer`, whatever stands around it; else 0.

    >>> last_number(["4 + 3 = 7.", "7, or 8", "1,000 it is"], [{"answer": "7"}, {"answer": "7"}, {"answer": "1000"}])
    [1.0, 0.0, 1.0]
    """
    found = [_NUMBER.findall(completion) for completion in completions]
    return [
        float(bool(numbers) and numbers[-1].replace(",", "") == str(row["answer"]))
        for numbers, row in zip(found, rows, strict=True)
    ]


def answer_of(completion: str) -> str:
    """What stands in the last `<answer>…</answer>`, else the whole completion; without white space around it.

    >>> answer_of("Two and two are <answer> 4 </answer>"), answer_of(" 4\\n")
    ('4', '4')
    """
    tagged = _TAGGED.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def _is_tagged(completion: str) -> float:
    return float(_ONE_ANSWER_AT_THE_END.fullmatch(completion) is not None)
