"""The conversations of rows in OpenAI form: checked, and brought to what chat templates expect."""

import json
import math
from dataclasses import dataclass
from typing import Any

from datum.errors import DataError

__all__ = ["ROLES", "Chat", "brief", "read_chat", "read_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have."""


@dataclass(slots=True)
class Chat:
    """A conversation ready to be rendered.

    Attributes:
        messages: Dicts with role, content (a string) and, as the row has them, tool_calls, name, reasoning_content, …
        weights: Loss weight of each message, 1 where the row says nothing.
        tools: Function schemas of the row's `tools` column, or None.
        where: Origin of the row.
        first_trained: Where the completion of a prompt/completion row starts; 0 for other rows.
    """

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    where: str
    first_trained: int = 0


def read_chat(data: dict[str, Any], where: str) -> Chat:
    """Read `messages` and `tools` of a row.

    Raises:
        DataError: Anything that is not of the OpenAI form; the text names the row and the message.
    """
    messages, weights = read_messages(data["messages"], where, "messages")
    return Chat(messages, weights, _read_tools(data.get("tools"), where), where)


def read_messages(value: Any, where: str, key: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Check a list of messages.

    Text parts of a content list are joined; a missing content beside tool calls is the empty string; arguments of tool
    calls that are JSON text become the object they hold; null fields are dropped; `weight` is taken out of the message.

    Args:
        value: What the row has under `key`.
        where: Origin of the row, for error texts.
        key: Column, for error texts.

    Returns:
        The messages, and the weight of each (1 where a message has none). Nothing is shared with `value` that a
        caller could edit by accident: the dicts of messages are new.
    """
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} must be a list of messages, got {type(value).__name__}")
    if not value:
        raise DataError(f"{where}: {key} is an empty conversation; remove the row or give it messages")
    messages, weights = [], []
    for index, item in enumerate(value):
        place = f"{where}: {key}[{index}]"
        if not isinstance(item, dict):
            raise DataError(f"{place} must be an object with role and content, got {type(item).__name__}")
        message = {name: field for name, field in item.items() if field is not None}
        weights.append(_read_weight(message.pop("weight", 1.0), place))
        role = message.get("role")
        if role not in ROLES:
            raise DataError(f"{place} has the unknown role {role!r}; accepted are {', '.join(ROLES)}")
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = _read_tool_calls(calls, role, place)
        message["content"] = _read_content(message, place)
        messages.append(message)
    return messages, weights


def _read_content(message: dict[str, Any], place: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if "tool_calls" in message:
            return ""
        raise DataError(f"{place} has no content; accepted are a string or a list of text parts")
    if not isinstance(content, list):
        raise DataError(f"{place}: content must be a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"{place}: content has a part of type {kind!r}; a Datum is text, accepted are parts "
                '{"type": "text", "text": …}'
            )
        texts.append(part["text"])
    return "".join(texts)


def _read_weight(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{place}: weight must be a number, got {value!r}")
    if not math.isfinite(value):
        raise DataError(f"{place}: weight must be finite, got {value!r}")
    return float(value)


def _read_tool_calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise DataError(f"{place}: tool_calls belong to assistant messages, this one is of role {role}")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place}: tool_calls must be a list of objects, got {brief(calls)}")
    result = []
    for number, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{place}: tool_calls[{number}] has no function name; accepted is "
                '{"type": "function", "function": {"name": …, "arguments": {…}}}'
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # OpenAI sends text; templates write objects as JSON themselves
            arguments = _parse_json(arguments, f"{place}: arguments of tool_calls[{number}]")
        if not isinstance(arguments, dict):
            raise DataError(f"{place}: arguments of tool_calls[{number}] must be an object, got {brief(arguments)}")
        function = {**function, "arguments": arguments}
        result.append({**call, "function": function} if "function" in call else function)
    return result


def _read_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _parse_json(tools, f"{where}: tools") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools must be a list of function schemas (or its JSON text), got {brief(tools)}")
    return tools


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{what} is text but no JSON ({error.msg} at column {error.colno}): {brief(text)}") from error


def brief(value: Any) -> str:
    """A value as error texts show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
