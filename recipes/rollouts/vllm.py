"""`rollout=vllm`: completions from running vLLM servers, whose weights are those of the model in training.

Token ids go out and token ids come back; no text is encoded or decoded. Each completion is a request of its own, seeded
by its place in the run, so that a server gives the same completion for it whatever else it is doing, as far as its
arithmetic does not depend on the batch. Server defaults that would bend the distribution (a repetition penalty of the
checkpoint's generation config, say) are overridden by every request.

Hand-over. `update_weights` writes the weights (adapters merged in) or the adapter alone as a folder, tells each server
to load it, and empties its prefix cache, whose keys and values belong to the old weights. `policy_version` grows once
every server has done so. Sampling and hand-over exclude each other: a batch has one version.
"""

import contextlib
import hashlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor

from conf.policy import VLLMRolloutConfig, WeightSync
from conf.schema import LoraExport
from recipes.models.build import LanguageModel
from recipes.models.scoring import base_of
from recipes.models.tied import is_tied
from recipes.rollouts.sampler import Completion, RolloutError, SampleRequest, Sampling
from recipes.rollouts.vllm_server import AnswerError, VLLMServer, find_model, is_same, read_choice
from recipes.rollouts.vllm_weights import write_weights
from recipes.training.answers import stop_ids
from recipes.training.ranks import rank_and_world, wait_for_ranks

__all__ = ["VLLMSampler", "build", "request_seed"]

log = logging.getLogger(__name__)

_ADAPTER = "policy"  # name under which servers know the adapter
_KEPT = 2  # folders of weights: the newest, and the one before
_RESET_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # while a request is still using the prefix cache
_EXPORTS = {WeightSync.disk: LoraExport.merged, WeightSync.lora: LoraExport.adapter}


def build(
    config: VLLMRolloutConfig,
    language_model: LanguageModel,
    *,
    seed: int,
    run_dir: Path,
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    own_copy: bool = False,
) -> "VLLMSampler":
    """Find the servers, and hand them the weights.

    Args:
        config: Options.
        language_model: The model in training.
        seed: Of the run.
        run_dir: Run folder; weights are written to its `weights` where `rollout.sync_dir` does not say otherwise.
        autocast: Not used: servers compute in their own dtype.
        own_copy: Not used: servers have their own weights.

    Raises:
        RolloutError: A server is absent or serves another model, or the weights cannot be handed over.
    """
    return VLLMSampler(config, language_model, seed=seed, sync_dir=Path(config.sync_dir or run_dir / "weights"))


class VLLMSampler:
    """A sampler whose tokens come from vLLM servers.

    Args:
        config: Options.
        language_model: The model in training.
        seed: Of the run.
        sync_dir: Folder for weights, which the servers must see under the same path.

    Attributes:
        policy_version: How many times weights were handed over since construction, whose own hand-over is version 0.

    Raises:
        RolloutError: A server is absent or serves another model, or the weights cannot be handed over.
    """

    def __init__(self, config: VLLMRolloutConfig, language_model: LanguageModel, *, seed: int, sync_dir: Path):
        self.policy_version = 0
        self._config, self._language_model, self._seed = config, language_model, seed
        self._sync_dir = sync_dir.expanduser().absolute()
        self._stops = sorted(stop_ids(language_model.model, language_model.tokenizer))
        _check_sync(config, language_model)
        self._servers = [
            VLLMServer(
                url,
                timeout_s=config.timeout_s,
                retries=config.retries,
                backoff_s=config.backoff_s,
                connections=config.concurrency,
            )
            for url in config.servers
        ]
        self._models = [find_model(server, config.model, language_model.config.name) for server in self._servers]
        self._are_processed: bool | None = None  # log-probabilities after temperature and cuts; None: not asked yet
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="vllm")
        if config.sync == WeightSync.lora:
            self._hand_over_base()
        self._hand_over(self.policy_version)

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        """Complete the prompts; completions come in the order of the requests.

        Raises:
            RolloutError: A server does not answer, a prompt leaves no room for its completion, or a server returns
                another kind of log-probability than the sampling needs.
        """
        for request in requests:
            self._check_length(request)
        with self._lock:
            if requests and (sampling.temperature not in (0, 1) or sampling.logprob_kind == "renormalised"):
                self._require_processed(requests[0], sampling)
            futures = [self._pool.submit(self._complete, i, request, sampling) for i, request in enumerate(requests)]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def update_weights(self) -> None:
        """Hand the trainer's weights to every server, once no batch is under way; `policy_version` grows by 1.

        Every rank must call it; rank 0 writes and hands over.

        Raises:
            RolloutError: A server does not take them.
            ModelError: A weight is not finite.
        """
        self._hand_over(self.policy_version + 1)

    def close(self) -> None:
        """Drop requests not yet sent, close the connections, delete the weights' folders; the servers go on running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()
        if rank_and_world()[0] == 0:
            self._remove_old(keep=0)
            with contextlib.suppress(OSError):  # not empty
                self._sync_dir.rmdir()

    # ---------------------------------------------------------------------------------------------------- completions

    def _complete(self, index: int, request: SampleRequest, sampling: Sampling) -> Completion:
        place = index % len(self._servers)
        server = self._servers[place]
        answer = server.post(
            "/v1/completions",
            {
                **self._plain_request(place, request.prompt_ids, request.max_new_tokens),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": request_seed(self._seed, request),
                "stop_token_ids": self._stops,
            },
        )
        ids, logprobs, finish = read_choice(answer, request.prompt_ids, server.url)
        is_finished = finish == "stop" or ids[-1] in self._stops
        return Completion(ids, logprobs, is_finished, self.policy_version)

    def _plain_request(self, place: int, prompt_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """What all requests have in common, defaults of the served checkpoint overridden."""
        is_adapter = self._config.sync == WeightSync.lora
        return {
            "model": _ADAPTER if is_adapter else self._models[place].id,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "n": 1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # stop_token_ids is the whole set
            "logprobs": 0,  # of the sampled id alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    def _check_length(self, request: SampleRequest) -> None:
        for server, model in zip(self._servers, self._models, strict=True):
            length = len(request.prompt_ids) + request.max_new_tokens
            if model.max_length is not None and length > model.max_length:
                raise RolloutError(
                    f"a prompt of {len(request.prompt_ids)} tokens with max_new_tokens={request.max_new_tokens} is "
                    f"longer than the {model.max_length} tokens that {server.url} takes; lower "
                    f"rollout.max_new_tokens, or start the server with --max-model-len {length}"
                )

    def _require_processed(self, request: SampleRequest, sampling: Sampling) -> None:
        """Refuse servers whose log-probabilities are those before temperature and cuts.

        Where one id alone is allowed, its log-probability is 0 after processing. Before, at most one of two ids can
        have a probability above a half.
        """
        if self._are_processed is None:
            for place, server in enumerate(self._servers):
                for token in (0, 1):
                    body = self._plain_request(place, request.prompt_ids, 1)
                    answer = server.post("/v1/completions", body | {"temperature": 1.0, "allowed_token_ids": [token]})
                    _, logprobs, _ = read_choice(answer, request.prompt_ids, server.url)
                    if logprobs[0] < math.log(0.6):
                        raise RolloutError(
                            f"{server.url} returns log-probabilities before temperature, top-k and top-p, but "
                            f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k} "
                            "needs those of the distribution sampled from; start it with --logprobs-mode "
                            "processed_logprobs"
                        )
            self._are_processed = True

    # -------------------------------------------------------------------------------------------------------- weights

    def _hand_over(self, version: int) -> None:
        is_first_rank = rank_and_world()[0] == 0
        start = time.perf_counter()
        folder = self._sync_dir / f"version-{version}"
        if is_first_rank:
            self._write(folder, _EXPORTS[self._config.sync])
        written = time.perf_counter()
        with self._lock:
            wait_for_ranks()  # nobody is sampling now
            if is_first_rank:
                for _ in self._pool.map(lambda server: self._load(server, folder), self._servers):
                    pass
            wait_for_ranks()
            self.policy_version = version
        if is_first_rank:
            self._remove_old(keep=_KEPT)
        log.debug(
            "weights of version %d: written in %.2f s, loaded in %.2f s",
            version,
            written - start,
            time.perf_counter() - written,
        )

    def _hand_over_base(self) -> None:
        """Give servers what the adapter sits on, since they may still have the weights of an earlier run."""
        if rank_and_world()[0] != 0:
            return
        name, folder = self._language_model.config.name, self._sync_dir / "base"
        is_from_root = name is not None and all(is_same(name, model.root) for model in self._models)
        if is_from_root and not is_tied(base_of(self._language_model.model)):  # a checkpoint lacks a tied head
            sources = [model.root for model in self._models]
        else:
            state = self._language_model.model.state_dict()
            self._write(folder, LoraExport.merged, {name: w for name, w in state.items() if ".lora_" not in name})
            sources = [str(folder)] * len(self._models)
        for server, source in zip(self._servers, sources, strict=True):
            self._tell(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": source}})
        shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path, export: LoraExport, state_dict: Mapping[str, Tensor] | None = None) -> None:
        try:
            write_weights(self._language_model, folder, export, state_dict)
        except OSError as error:
            raise RolloutError(
                f"weights cannot be written to {self._sync_dir} ({error}); give rollout.sync_dir=<folder that the "
                "servers can read>"
            ) from error

    def _load(self, server: VLLMServer, folder: Path) -> None:
        """Load new weights, and forget what was computed with the old ones."""
        if self._config.sync == WeightSync.lora:
            adapter = {"lora_name": _ADAPTER, "lora_path": str(folder), "load_inplace": True}
            self._tell(server, "/v1/load_lora_adapter", adapter)
        else:
            self._tell(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        for pause_s in _RESET_PAUSES_S:
            answer = self._tell(server, "/reset_prefix_cache", {})
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            time.sleep(pause_s)
        raise RolloutError(
            f"{server.url} does not empty its prefix cache, which belongs to older weights: other requests keep it in "
            "use; let no one else use the server during the run"
        )

    def _tell(self, server: VLLMServer, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return server.post(path, body)
        except AnswerError as error:
            raise RolloutError(f"{error}\n{_how_to_start(self._config.sync)}") from error

    def _remove_old(self, keep: int) -> None:
        folders = [f for f in self._sync_dir.glob("version-*") if f.name.removeprefix("version-").isdigit()]
        folders.sort(key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in folders[keep:]:
            shutil.rmtree(folder, ignore_errors=True)


def request_seed(seed: int, request: SampleRequest) -> int:
    """Seed of a completion, 31 bits: a function of the run's seed and of the request's place in the run.

    >>> request_seed(0, SampleRequest(prompt_ids=(1,), prompt=0, sample=0)) == request_seed(
    ...     0, SampleRequest(prompt_ids=(1,), prompt=0, sample=1)
    ... )
    False
    """
    key = f"{seed}/{request.stream}/{request.step}/{request.prompt}/{request.sample}/{request.position}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1


def _check_sync(config: VLLMRolloutConfig, language_model: LanguageModel) -> None:
    if config.sync != WeightSync.lora:
        return
    if not isinstance(language_model.model, PeftModel):
        raise RolloutError(
            "rollout.sync=lora hands an adapter over, but model.lora.rank=0; use rollout.sync=disk, or train an adapter"
        )
    if language_model.config.added_tokens:
        raise RolloutError(
            "rollout.sync=lora: vLLM takes no rows of added tokens (model.added_tokens) with an adapter; use "
            "rollout.sync=disk"
        )


def _how_to_start(sync: WeightSync) -> str:
    if sync == WeightSync.lora:
        return (
            "rollout.sync=lora needs a server started with --enable-lora (and --max-lora-rank from the adapter's rank "
            "on), VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (docs/vllm.md)"
        )
    return (
        "rollout.sync=disk needs a server started with VLLM_SERVER_DEV_MODE=1 that can read rollout.sync_dir under the "
        "same path (docs/vllm.md)"
    )
