"""Word problems with a final answer, compared by value with math-verify: 1/2 is 0.5, and 3,000 is 3000.

The form is that of GSM8K, one JSON object a line:

    {"question": "A box holds 12 eggs. How many do 3 boxes hold?", "answer": "3 * 12 = 36\\n#### 36"}
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from conf.closed import ConfigError
from conf.environments import MathConfig
from datum.errors import DataError
from datum.rows import Row
from recipes.environments.environment import Environment, Problem, chat, parse_rewards
from recipes.environments.formats import answer_of
from recipes.environments.records import read_problems

__all__ = ["build", "correct", "final_answer"]

try:
    import math_verify
except ImportError:  # an extra; `build` says how to install it
    math_verify = None

_MARK = "####"

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn that their own, alarm-based timeouts are off


def build(config: MathConfig, seed: int) -> Environment:
    """A problem for each row of the files; `row["answer"]` is the final answer, `row["solution"]` the whole column.

    Raises:
        ConfigError: math-verify is missing, or more problems are asked for than there are.
        DataError: A row without question or answer, or a question that is there twice; names file and line.
    """
    if math_verify is None:
        raise ConfigError("environment=math needs math-verify: pip install 'math-verify[antlr4_9_3]'")
    train, heldout = read_problems(config, lambda row: _problem(row, config))
    return Environment("math", train, heldout, parse_rewards(config.rewards))


def correct(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the completion's final answer has the value of the row's `answer`; else 0.

    It is looked for between `<answer>` tags, else behind the last ####, else anywhere in the completion: in a box
    (`\\boxed`), in a formula, or the last number.

    Raises:
        ValueError: The row's answer is nothing that math-verify can read.
    """
    return [float(_is_equal(row["answer"], completion)) for completion, row in zip(completions, rows, strict=True)]


def final_answer(text: str) -> str:
    """What follows the last ####, else the whole text.

    >>> final_answer("12 * 7 = 84\\n#### 84"), final_answer("84")
    ('84', '84')
    """
    return text.rpartition(_MARK)[2].strip()


def _is_equal(expected: str, completion: str) -> bool:
    def parsed(text: str) -> list[Any]:
        # No timeouts by signals: they need the main thread, and whoever calls this has one already.
        return math_verify.parse(text, parsing_timeout=None)

    gold = parsed(f"${expected}$") or parsed(expected)
    if not gold:
        raise ValueError(f"the answer {expected!r} of the row is nothing that math-verify can read")
    answer = final_answer(answer_of(completion))
    is_bare = answer != completion.strip() or len(answer.split()) == 1  # all of it is the answer, marked or alone
    candidates = [parsed(f"${answer}$"), parsed(answer)] if is_bare else [parsed(answer)]
    return any(math_verify.verify(gold, candidate, timeout_seconds=None) for candidate in candidates if candidate)


def _problem(row: Row, config: MathConfig) -> Problem:
    texts = []
    for option, key in (("question_key", config.question_key), ("answer_key", config.answer_key)):
        value = row.data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and option == "answer_key":
            value = str(value)
        if not isinstance(value, str) or not final_answer(value):
            raise DataError(
                f"{row.where}: {key} is {value!r}; accepted is a text that is not empty. The row has the keys "
                f"{', '.join(sorted(map(str, row.data))) or 'none'}; environment.{option} names the column"
            )
        texts.append(value)
    question, solution = texts
    judged = {**row.data, "solution": solution, "answer": final_answer(solution)}
    return Problem(row.where, chat(question, config.system_prompt), judged)
