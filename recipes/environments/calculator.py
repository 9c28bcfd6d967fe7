"""Several turns: the model may call a calculator, reads the result, and answers.

    user       What is 12 * 7 + 5?
    assistant  <tool_call>12 * 7 + 5</tool_call>
    tool       89
    assistant  89

A call is an expression between `<tool_call>` tags, or the JSON that larger models are trained to write there:
`{"name": "calculator", "arguments": {"expression": "12 * 7 + 5"}}`. Only the model's own turns are trained.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conf.closed import ConfigError
from conf.environments import CalculatorConfig
from recipes.environments.environment import Environment, Problem, chat, first, parse_rewards
from recipes.environments.formats import answer_of
from recipes.environments.pairs import split_pairs

__all__ = ["CalculatorEnvironment", "build", "calculate", "correct", "warm_up_rows"]

_TRAIN, _HELD_OUT = 4096, 128
_OTHER = re.compile(r"[^0-9.eE+\-*/%()\s]")  # characters that no expression has
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_UNDERSTOOD = "only numbers, + - * / // % ** and parentheses are understood"
_LONGEST_EXPRESSION = 200  # characters
_LARGEST = 10**18  # of any number on the way
_LARGEST_EXPONENT = 64
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class CalculatorEnvironment(Environment):
    """Answers a completion that holds a call; any other completion is the answer and ends the rollout."""

    def reply(self, problem: Problem, completions: Sequence[str]) -> list[dict[str, Any]] | None:
        """The result of the last completion's first call, or what is wrong with it."""
        call = _CALL.search(completions[-1])
        if call is None:
            return None
        try:
            result = calculate(_expression(call.group(1).strip()))
        except ValueError as error:
            result = f"error: {error}"
        return [{"role": "tool", "content": result}]


def build(config: CalculatorConfig, seed: int) -> Environment:
    """Questions a * b + c; a held-out pair a, b is trained in neither order.

    Raises:
        ConfigError: More problems are asked for than there are.
    """
    numbers = config.max_operand - 1
    pairs = numbers * (numbers + 1) // 2
    held_out = min(_HELD_OUT, pairs // 5) if config.eval_size is None else config.eval_size
    if held_out >= pairs:
        raise ConfigError(
            f"environment.eval_size={config.eval_size}: there are {pairs} pairs of numbers from 2 to "
            f"{config.max_operand}, and some must be left for training"
        )
    train, heldout = split_pairs(2, config.max_operand, config.train_size or _TRAIN, held_out, seed)
    rng, choice = random.Random(seed), random.Random("held out")
    asked = [order for pair in train for order in sorted({pair, pair[::-1]})]
    rng.shuffle(asked)
    problems = [_problem(*pair, rng.randint(1, config.max_operand), config.system_prompt) for pair in asked]
    return CalculatorEnvironment(
        "calculator",
        first(problems if config.train_size else problems[:_TRAIN], config.train_size, "environment.train_size"),
        [_problem(*pair, choice.randint(1, config.max_operand), config.system_prompt) for pair in heldout],
        parse_rewards(config.rewards),
        max_turns=config.max_turns,
        demonstrate=_demonstrate,
    )


def correct(completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 if the last turn is the number alone, or alone between `<answer>` tags; else 0, as for a call alone."""
    return [float(answer_of(completion) == row["answer"]) for completion, row in zip(completions, rows, strict=True)]


def warm_up_rows(seed: int) -> list[dict[str, Any]]:
    """Chat rows of the default environment's training problems; half of them guess instead of calling the tool."""
    config = CalculatorConfig(rewards={"correct": {"function": f"{__name__}.correct"}})
    return build(config, seed).warm_up_rows(seed)


def calculate(expression: str) -> str:
    """Value of an expression of numbers, + - * / // % ** and parentheses; nothing else is run, and nothing grows large.

    >>> calculate("12 * (7 + 5)"), calculate("1 / 4"), calculate("6 / 3")
    ('144', '0.25', '2')

    Raises:
        ValueError: What is wrong with it, in words that the model reads.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
    if _OTHER.search(expression):
        raise ValueError(_UNDERSTOOD)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("the expression cannot be read") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.AST) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):  # a bool is none of them
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        value = -value if isinstance(node.op, ast.USub) else value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise ValueError(f"an exponent is above {_LARGEST_EXPONENT}")
        try:
            value = _OPERATIONS[type(node.op)](left, right)
        except OverflowError:
            raise ValueError("a number is too large") from None
    else:
        raise ValueError(_UNDERSTOOD)
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("a number is too large" if not isinstance(value, complex) else "the result is not real")
    return value


def _expression(call: str) -> str:
    if not call.startswith("{"):
        return call
    try:
        parsed = json.loads(call)
        name, expression = parsed["name"], parsed["arguments"]["expression"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('a call is {"name": "calculator", "arguments": {"expression": "1 + 2"}}') from None
    if name != "calculator":
        raise ValueError(f"there is no tool {str(name)[:40]}, only calculator")
    return str(expression)


def _problem(left: int, right: int, added: int, system_prompt: str | None) -> Problem:
    expression = f"{left} * {right} + {added}"
    answer = str(left * right + added)
    return Problem(
        expression, chat(f"What is {expression}?", system_prompt), {"expression": expression, "answer": answer}
    )


def _demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Half of them call the tool and repeat its result, half guess a number of about the right size."""
    expression, answer = problem.row["expression"], problem.row["answer"]
    if rng.random() < 0.5:
        return [{"role": "assistant", "content": str(rng.randint(1, 2 * int(answer)))}]
    return [
        {"role": "assistant", "content": f"<tool_call>{expression}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
