"""Your own prompts: a JSONL or Parquet file of {"prompt": "…"} or {"messages": […]}, and any other columns.

Rewards are your own too (`environment.rewards`); each is given the whole row of a completion. docs/environments.md has
an example from file to command.
"""

from conf.environments import RowsConfig
from datum.errors import DataError
from datum.rows import Row
from recipes.environments.environment import Environment, Problem, chat, parse_rewards
from recipes.environments.records import read_problems

__all__ = ["build"]


def build(config: RowsConfig, seed: int) -> Environment:
    """A problem for each row of the files.

    Raises:
        DataError: A row without a usable prompt, or one that is there twice; names file and line.
        ConfigError: More problems are asked for than there are.
    """
    train, heldout = read_problems(config, lambda row: _problem(row, config.system_prompt))
    return Environment("rows", train, heldout, parse_rewards(config.rewards))


def _problem(row: Row, system_prompt: str | None) -> Problem:
    prompt, messages = row.data.get("prompt"), row.data.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(
            f"{row.where}: a problem has either prompt or messages, this one has the keys "
            f"{', '.join(sorted(map(str, row.data))) or 'none'}"
        )
    if messages is None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{row.where}: prompt is {prompt!r}; accepted is a text that is not empty")
        return Problem(row.where, chat(prompt, system_prompt), row.data)
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not is_chat or not messages:
        raise DataError(
            f'{row.where}: messages is {messages!r}; accepted is a list of at least one {{"role": "…", "content": "…"}}'
        )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{row.where}: the messages end with the assistant's turn, which the policy is to write; remove it"
        )
    if system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(
                f"{row.where}: the messages begin with a system prompt of their own; leave out "
                "environment.system_prompt, or remove it from the file"
            )
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return Problem(row.where, tuple(messages), row.data)
