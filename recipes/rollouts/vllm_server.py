"""One running vLLM server, spoken to over HTTP: JSON in, JSON out, retries with growing pauses, errors in one line.

Tried again are a refused or broken connection, a timeout, and the answers 429, 500, 502, 503 and 504. Any other answer
but 200 is an error at once, since the same request would get it again.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError

from recipes.rollouts.sampler import RolloutError

__all__ = ["AnswerError", "ServedModel", "VLLMServer", "find_model", "is_same", "read_choice"]

_TRY_AGAIN = (429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 30.0
_CONNECT_S = 10.0
_LARGEST_LOGPROB = 1e-3  # rounding above 0


class AnswerError(RolloutError):
    """A server answers, but with an error."""


@dataclass(frozen=True)
class ServedModel:
    """A line of `/v1/models`.

    Attributes:
        id: Name that requests use.
        root: Path or hub id that it was loaded from.
        max_length: Longest prompt and completion together; None where the server does not say.
        is_adapter: A LoRA adapter on another model.
    """

    id: str
    root: str
    max_length: int | None
    is_adapter: bool


class VLLMServer:
    """A server by its address; may be used from several threads.

    Args:
        url: For example http://127.0.0.1:8000.
        timeout_s: Longest silence within a request.
        retries: How often a request is tried again.
        backoff_s: Pause before the second retry, doubled for each further one; the first retry comes at once.
        connections: Connections kept open.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int, backoff_s: float, connections: int):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._retries = retries
        # Each retry would be a warning; what they came to is in the error.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._http = urllib3.PoolManager(
            maxsize=connections,
            timeout=urllib3.Timeout(connect=min(timeout_s, _CONNECT_S), read=timeout_s),
            retries=urllib3.Retry(
                retries,
                status_forcelist=_TRY_AGAIN,
                allowed_methods=None,  # POST too: a completion depends on its own request alone
                backoff_factor=backoff_s / 2,  # urllib3 doubles it before its first use
                backoff_max=_LONGEST_PAUSE_S,
                raise_on_status=False,
            ),
        )

    def get(self, path: str) -> Any:
        """Answer to a GET.

        Raises:
            RolloutError: Nothing answers, or the answer is an error.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Answer to a POST of a JSON object; None where the answer is no JSON.

        Raises:
            RolloutError: Nothing answers, or the answer is an error.
        """
        return self._ask("POST", path, body or {})

    def models(self) -> list[ServedModel]:
        """What the server serves.

        Raises:
            RolloutError: Nothing answers, or not as vLLM does.
        """
        answer = self.get("/v1/models")
        try:
            return [
                ServedModel(
                    str(line["id"]),
                    str(line.get("root") or line["id"]),
                    line.get("max_model_len"),
                    bool(line.get("parent")),
                )
                for line in answer["data"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise RolloutError(
                f"{self.url}/v1/models answers, but not as a vLLM server does: {answer!r:.200}"
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = self._http.request(method, f"{self.url}{path}", json=body)
        except HTTPError as error:
            raise RolloutError(
                f"no vLLM server answers at {self.url}: {_reason(error)} ({path}, tried {self._retries + 1} times)\n"
                f"start one (docs/vllm.md), or give the address of a running one: rollout.servers=[http://host:port]"
            ) from error
        if response.status != 200:
            raise AnswerError(f"{self.url}{path} answers {response.status}: {_message(response.data)}")
        try:
            return json.loads(response.data)
        except ValueError:
            return None


def find_model(server: VLLMServer, wanted: str | None, trained: str | None) -> ServedModel:
    """The model of a server that is the one in training.

    Args:
        server: A server.
        wanted: `rollout.model`.
        trained: `model.name`; None for a model that comes from no folder, which any single served model may be.

    Raises:
        RolloutError: It serves another one.
    """
    served = [model for model in server.models() if not model.is_adapter]
    name = wanted or trained
    matches = [model for model in served if name is None or name == model.id or is_same(name, model.root)]
    if len(matches) == 1 or (matches and name is not None):
        return matches[0]
    shown = ", ".join(model.id for model in served) or "nothing"
    if name is None:
        raise RolloutError(f"{server.url} serves {shown}: say by rollout.model=<name> which of them is trained")
    raise RolloutError(
        f"{server.url} serves {shown}, but {'rollout.model' if wanted else 'model.name'}={name}; start it with --model "
        f"{name}" + ("" if wanted else f", or say by rollout.model={shown} that it is the same architecture")
    )


def is_same(name: str, root: str) -> bool:
    """Whether two model names are equal, or paths of one folder."""
    if name == root:
        return True
    mine, theirs = Path(name).expanduser(), Path(root).expanduser()
    return mine.is_dir() and mine.resolve() == theirs.resolve()


def read_choice(
    answer: Any, prompt_ids: Sequence[int], url: str
) -> tuple[tuple[int, ...], tuple[float, ...], str | None]:
    """Sampled ids, their log-probabilities looked up by id, and the finish reason.

    Raises:
        RolloutError: The answer lacks ids or log-probabilities, or belongs to another prompt.
    """
    try:
        choice: Mapping[str, Any] = answer["choices"][0]
        ids = tuple(int(i) for i in choice["token_ids"])
        read = tuple(int(i) for i in choice["prompt_token_ids"])
        top = choice["logprobs"]["top_logprobs"]
        logprobs = tuple(float(scores[f"token_id:{i}"]) for i, scores in zip(ids, top, strict=True))
        finish = choice["finish_reason"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RolloutError(
            f"{url}/v1/completions gives no token ids with log-probabilities ({type(error).__name__}: {error}); a vLLM "
            "server from version 0.11 on is needed (return_token_ids)"
        ) from error
    if read != tuple(prompt_ids):
        raise RolloutError(f"{url} read another prompt than it was sent: {len(read)} ids for {len(prompt_ids)}")
    if not ids or finish not in ("stop", "length"):
        raise RolloutError(f"{url} ended a completion of {len(ids)} tokens with {finish!r}; stop and length are known")
    if max(logprobs) > _LARGEST_LOGPROB or any(map(math.isnan, logprobs)):
        raise RolloutError(
            f"{url} gave {max(logprobs):g} for a log-probability: start it with --logprobs-mode processed_logprobs, "
            "not with logits"
        )
    return ids, logprobs, finish


def _reason(error: HTTPError) -> str:
    """The last part of urllib3's chain of reasons: `[Errno 111] Connection refused`."""
    reason = error.reason if isinstance(error, MaxRetryError) and error.reason is not None else error
    return str(reason).rpartition(": ")[2]


def _message(data: bytes) -> str:
    """What an error's body says, in one line of at most 500 characters."""
    text = data.decode(errors="replace")
    try:
        answer = json.loads(text)
        error = answer.get("error", answer)
        text = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:500] or "(no text)"
