"""rollout=vllm against a server in this process that speaks as vLLM does: requests, answers, retries, refusals."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.policy import VLLMRolloutConfig, WeightSync
from conf.schema import HFModelConfig, LoraConfig, TinyModelConfig
from recipes.models.build import LanguageModel, build_model
from recipes.models.errors import ModelError
from recipes.rollouts.sampler import RolloutError, SampleRequest, Sampling
from recipes.rollouts.vllm import VLLMSampler, build, request_seed
from recipes.rollouts.vllm_server import read_choice

SEQUENCE = (7, 8, 9)


class FakeServer(ThreadingHTTPServer):
    """Completes every prompt with SEQUENCE, cut at max_tokens; the log-probability of id i is -i / 10.

    Attributes:
        calls: Path and body of each request, in order.
        failures: Statuses that the next requests get instead of an answer; 0 breaks the connection.
        weights: What was loaded by the last hand-over.
        change: Alters an answer before it is sent.
        delay_s: Time a completion takes.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.change: Callable[[str, Any], Any] = lambda path, answer: answer
        self.delay_s = 0.0
        self.served = [{"id": "policy-7b", "root": "/models/policy-7b", "max_model_len": 64, "parent": None}]
        self.is_processed = True
        self.resets_refused = 0
        self.running = self.most_running = self.running_at_reload = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def completions(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == "/v1/completions"]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": self.served}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.running_at_reload = max(self.running_at_reload, self.running)
            files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
            self.weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
            return {"results": [None]}
        if path == "/v1/load_lora_adapter":
            assert body["load_inplace"]
            self.weights = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            return None
        if path == "/reset_prefix_cache":
            self.resets_refused -= 1
            return {"success": self.resets_refused < 0}
        allowed = body.get("allowed_token_ids")
        ids = (allowed if allowed else list(SEQUENCE))[: body["max_tokens"]]
        values = [0.0 if allowed and self.is_processed else -i / 10 - 1 for i in ids]
        # The first entry is not the sampled one: a lookup by place would find it.
        top = [{"token_id:1": -0.01, f"token_id:{i}": value} for i, value in zip(ids, values)]
        time.sleep(self.delay_s)
        return {
            "choices": [
                {
                    "token_ids": ids,
                    "prompt_token_ids": body["prompt"],
                    "finish_reason": "stop" if ids[-1] in body.get("stop_token_ids", []) else "length",
                    "logprobs": {"top_logprobs": top},
                }
            ]
        }


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.lock:
            server.calls.append((self.path, body))
            failure = server.failures.pop(0) if server.failures else None
            server.running += self.path == "/v1/completions"
            server.most_running = max(server.most_running, server.running)
        if failure == 0:
            self.close_connection = True
            return
        status, answer = 200, server.change(self.path, None if failure else server.answer(self.path, body))
        if failure:
            status, answer = failure, {"error": {"message": f"failure {failure}\nsecond line", "code": failure}}
        with server.lock:
            server.running -= self.path == "/v1/completions"
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    """Two running servers."""
    both = [FakeServer(), FakeServer()]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True) for server in both]
    for thread in threads:
        thread.start()
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(servers: list[FakeServer]) -> FakeServer:
    return servers[0]


def tiny(rank: int = 0, **options: Any) -> LanguageModel:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return build_model(TinyModelConfig(lora=LoraConfig(rank=rank), **shape, **options), seed=0)


def config(*used: FakeServer, **options: Any) -> VLLMRolloutConfig:
    fixed = {"retries": 2, "backoff_s": 0.0, "timeout_s": 5.0, "concurrency": 4}
    return VLLMRolloutConfig(servers=[server.url for server in used], **(fixed | options))


def sampler(tmp_path: Path, *used: FakeServer, model: LanguageModel | None = None, **options: Any) -> VLLMSampler:
    return build(config(*used, **options), model or tiny(), seed=3, run_dir=tmp_path)


def requests(count: int, **options: Any) -> list[SampleRequest]:
    return [SampleRequest(prompt_ids=(1, 2, i), prompt=i // 2, sample=i % 2, **options) for i in range(count)]


# ------------------------------------------------------------------------------------------------------- completions


def test_ids_and_their_own_logprobs_come_back_in_order(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        completions = vllm.sample(requests(9), Sampling())
    assert sorted(body["prompt"] for body in server.completions()) == [[1, 2, i] for i in range(9)]
    assert len(completions) == 9
    for completion in completions:
        assert completion.ids == SEQUENCE
        assert completion.logprobs == pytest.approx([-1.7, -1.8, -1.9])
        assert not completion.is_finished
        assert completion.policy_version == 0


def test_the_logprob_is_that_of_the_sampled_id() -> None:
    choice = {
        "token_ids": [12],
        "prompt_token_ids": [5],
        "finish_reason": "length",
        "logprobs": {"top_logprobs": [{"token_id:9": -0.7, "token_id:12": -4.2}]},
    }
    assert read_choice({"choices": [choice]}, [5], "http://h") == ((12,), (-4.2,), "length")


def test_every_stop_id_ends_a_completion_even_the_last_token_allowed(server: FakeServer, tmp_path: Path) -> None:
    model = tiny()
    model.model.generation_config.eos_token_id = [5, 9]  # type: ignore[union-attr]
    with closing(sampler(tmp_path, server, model=model)) as vllm:
        (whole,) = vllm.sample(requests(1), Sampling())
        (cut,) = vllm.sample(requests(1, max_new_tokens=2), Sampling())
        server.change = lambda path, answer: json.loads(json.dumps(answer).replace('"stop"', '"length"'))
        (full,) = vllm.sample(requests(1, max_new_tokens=3), Sampling())
    assert (whole.ids, whole.is_finished) == (SEQUENCE, True)
    assert (cut.ids, cut.is_finished) == (SEQUENCE[:2], False)
    assert full.is_finished
    body = server.completions()[0]
    assert body["stop_token_ids"] == sorted({5, 9, model.tokenizer.eos_token_id})
    assert body["ignore_eos"] is True


def test_requests_say_everything_that_a_server_has_defaults_for(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        vllm.sample(requests(1, max_new_tokens=5), Sampling(temperature=0.5, top_p=0.9, top_k=7))
    body = server.completions()[-1]
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 5, "n": 1, "min_p": 0.0}
    expected |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0}
    assert {name: body[name] for name in expected} == expected
    assert body["return_token_ids"] is body["return_tokens_as_token_ids"] is True
    assert body["model"] == "policy-7b"


def test_requests_are_spread_over_servers_and_run_together(servers: list[FakeServer], tmp_path: Path) -> None:
    for server in servers:
        server.delay_s = 0.05
    with closing(sampler(tmp_path, *servers)) as vllm:
        vllm.sample(requests(12), Sampling())
    assert [len(server.completions()) for server in servers] == [6, 6]
    assert 2 <= sum(server.most_running for server in servers) <= 4  # concurrency=4


def test_seeds_depend_on_the_place_in_the_run_alone() -> None:
    base = SampleRequest(prompt_ids=(1,), prompt=2, sample=3, step=4)
    same = SampleRequest(prompt_ids=(9, 9), prompt=2, sample=3, step=4, max_new_tokens=99)
    assert request_seed(0, base) == request_seed(0, same)
    others = [
        SampleRequest((1,), prompt=3, sample=3, step=4),
        SampleRequest((1,), prompt=2, sample=4, step=4),
        SampleRequest((1,), prompt=2, sample=3, step=5),
        SampleRequest((1,), prompt=2, sample=3, step=4, stream="eval"),
        SampleRequest((1,), prompt=2, sample=3, step=4, position=1),
    ]
    seeds = {request_seed(0, request) for request in [base, *others]} | {request_seed(1, base)}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seeds_are_sent(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        vllm.sample(requests(4), Sampling())
    assert {body["seed"] for body in server.completions()} == {request_seed(3, request) for request in requests(4)}


# ------------------------------------------------------------------------------------------------- retries and errors


@pytest.mark.parametrize("failures", [[503, 429], [0], [500, 0]])
def test_failures_that_pass_are_tried_again(server: FakeServer, tmp_path: Path, failures: list[int]) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        server.failures = list(failures)
        (completion,) = vllm.sample(requests(1), Sampling())
    assert completion.ids == SEQUENCE
    assert len(server.completions()) == len(failures) + 1


def test_a_timeout_is_tried_again(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server, timeout_s=0.2)) as vllm:
        server.delay_s = 0.6
        threading.Timer(0.3, setattr, (server, "delay_s", 0.0)).start()
        (completion,) = vllm.sample(requests(1), Sampling())
    assert completion.ids == SEQUENCE
    assert len(server.completions()) > 1


def test_an_error_that_stays_is_told_at_once(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        server.failures = [400]
        with pytest.raises(RolloutError, match=rf"^{server.url}/v1/completions answers 400: failure 400 second line$"):
            vllm.sample(requests(1), Sampling())
    assert len(server.completions()) == 1


def test_retries_end(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        server.failures = [503] * 9
        with pytest.raises(RolloutError, match="answers 503: failure 503"):
            vllm.sample(requests(1), Sampling())
    assert len(server.completions()) == 3  # retries=2


def test_an_absent_server(server: FakeServer, tmp_path: Path) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(RolloutError) as caught:
        sampler(tmp_path, server)
    text = str(caught.value)
    assert text.startswith(
        f"no vLLM server answers at {url}: [Errno 111] Connection refused (/v1/models, tried 3 times)"
    )
    assert "rollout.servers=" in text
    assert text.count("\n") == 1


def test_another_kind_of_server(server: FakeServer, tmp_path: Path) -> None:
    server.change = lambda path, answer: {"hello": "world"}
    with pytest.raises(RolloutError, match=r"answers, but not as a vLLM server does: \{'hello': 'world'\}"):
        sampler(tmp_path, server)


def test_another_model(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"serves policy-7b, but rollout\.model=other; start it with --model other$"):
        build(config(server, model="other"), tiny(), seed=0, run_dir=tmp_path)
    trained = tiny()
    trained.config = HFModelConfig(name="someone/other")
    with pytest.raises(RolloutError, match=r"serves policy-7b, but model\.name=someone/other; .*rollout\.model=policy"):
        sampler(tmp_path, server, model=trained)
    assert "/collective_rpc" not in server.paths()


def test_models_are_known_by_name_or_folder(server: FakeServer, tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    folder.mkdir()
    server.served = [
        {"id": "adapter", "root": str(folder), "max_model_len": 64, "parent": "policy-7b"},
        {"id": "other", "root": "/models/other", "max_model_len": 64, "parent": None},
        {"id": "served", "root": f"{tmp_path}/./trained", "max_model_len": 64, "parent": None},
    ]
    trained = tiny()
    trained.config = HFModelConfig(name=str(folder))
    with closing(sampler(tmp_path, server, model=trained)) as vllm:
        vllm.sample(requests(1), Sampling())
    assert server.completions()[0]["model"] == "served"
    with pytest.raises(RolloutError, match=r"serves other, served: say by rollout\.model=<name>"):
        sampler(tmp_path, server)


def test_a_prompt_without_room(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        vllm.sample(requests(1, max_new_tokens=61), Sampling())
        with pytest.raises(RolloutError, match=r"prompt of 3 tokens with max_new_tokens=62 is longer than the 64 "):
            vllm.sample(requests(1, max_new_tokens=62), Sampling())


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"token_ids": [7, 8, 9]', '"token_ids": null', "gives no token ids with log-probabilities"),
        ('"token_ids": [7, 8, 9]', '"token_ids": [7, 8]', "gives no token ids with log-probabilities"),
        ('"token_id:8"', '"token_id:88"', r"KeyError: 'token_id:8'"),
        ('"prompt_token_ids": [1, 2, 0]', '"prompt_token_ids": [1, 2, 3, 0]', "read another prompt than it was sent"),
        ('"length"', '"abort"', "ended a completion of 3 tokens with 'abort'"),
        ("-1.7", "1.7", "1.7 for a log-probability: start it with --logprobs-mode processed_logprobs"),
    ],
)
def test_answers_that_do_not_fit(server: FakeServer, tmp_path: Path, old: str, new: str, text: str) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        server.change = lambda path, answer: json.loads(json.dumps(answer).replace(old, new))
        with pytest.raises(RolloutError, match=text):
            vllm.sample(requests(1), Sampling())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.5)])
def test_logprobs_before_temperature_or_cuts_are_refused(
    server: FakeServer, tmp_path: Path, sampling: Sampling
) -> None:
    with closing(sampler(tmp_path, server)) as vllm:
        server.is_processed = False
        for plain in (Sampling(), Sampling(temperature=0)):
            vllm.sample(requests(1), plain)
        with pytest.raises(RolloutError, match="--logprobs-mode processed_logprobs") as caught:
            vllm.sample(requests(1), sampling)
        assert f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}" in str(
            caught.value
        )
        server.is_processed = True
        count = len(server.completions())
        vllm.sample(requests(1), sampling)
        vllm.sample(requests(1), sampling)
        assert len(server.completions()) == count + 2 + 2  # asked once, with two ids


# ------------------------------------------------------------------------------------------------------------ weights


def test_weights_reach_every_server_before_the_version_grows(servers: list[FakeServer], tmp_path: Path) -> None:
    model = tiny()
    with closing(sampler(tmp_path, *servers, model=model)) as vllm:
        for version in range(3):
            assert vllm.policy_version == version
            for server in servers:
                assert server.paths()[-2:] == ["/collective_rpc", "/reset_prefix_cache"]
                state = model.model.state_dict()
                assert server.weights.keys() == state.keys()
                assert all(torch.equal(server.weights[name], state[name]) for name in state)
            assert [c.policy_version for c in vllm.sample(requests(2), Sampling())] == [version] * 2
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.add_(1.0)
            vllm.update_weights()
        kept = sorted(folder.name for folder in (tmp_path / "weights").iterdir())
        assert kept == ["version-2", "version-3"]
    assert not (tmp_path / "weights").exists()


def test_a_server_that_fails_leaves_the_version(servers: list[FakeServer], tmp_path: Path) -> None:
    with closing(sampler(tmp_path, *servers)) as vllm:
        servers[1].failures = [404]
        with pytest.raises(RolloutError, match=r"/collective_rpc answers 404(.|\n)*VLLM_SERVER_DEV_MODE=1"):
            vllm.update_weights()
        assert vllm.policy_version == 0


def test_a_cache_in_use_is_emptied_later(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with closing(sampler(tmp_path, server)) as vllm:
        monkeypatch.setattr("recipes.rollouts.vllm.time.sleep", pauses.append)
        server.resets_refused = 2
        vllm.update_weights()
        assert vllm.policy_version == 1
        assert len(pauses) == 2
        server.resets_refused = 99
        with pytest.raises(RolloutError, match="does not empty its prefix cache"):
            vllm.update_weights()
        assert vllm.policy_version == 1


def test_weights_that_are_not_finite_are_not_handed_over(server: FakeServer, tmp_path: Path) -> None:
    model = tiny()
    with closing(sampler(tmp_path, server, model=model)) as vllm:
        with torch.no_grad():
            next(model.model.parameters()).fill_(math.nan)
        with pytest.raises(ModelError, match="not finite"):
            vllm.update_weights()
        assert vllm.policy_version == 0
        assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["version-0"]


@pytest.mark.parametrize("shard_size", [None, "4KB"])
def test_a_tied_head_is_handed_over_under_its_own_name(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str | None
) -> None:
    model = tiny(tie_embeddings=True)
    if shard_size:
        save = type(model.model).save_pretrained
        monkeypatch.setattr(
            type(model.model), "save_pretrained", lambda *args, **kw: save(*args, max_shard_size=shard_size, **kw)
        )
    with closing(sampler(tmp_path, server, model=model)):
        (folder,) = (tmp_path / "weights").iterdir()
        embedding = model.model.get_input_embeddings().weight
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            torch.testing.assert_close(server.weights[name], embedding.detach(), rtol=0, atol=0)
        index = folder / "model.safetensors.index.json"
        assert index.exists() == (shard_size is not None)
        if index.exists():
            assert json.loads(index.read_text())["weight_map"].keys() == server.weights.keys()


def test_adapters_are_merged_into_the_weights(server: FakeServer, tmp_path: Path) -> None:
    model = tiny(rank=2)
    base = model.model.get_base_model()
    before = base.model.layers[0].mlp.up_proj.base_layer.weight.clone()
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    with closing(sampler(tmp_path, server, model=model)):
        merged = server.weights["model.layers.0.mlp.up_proj.weight"]
        assert not torch.equal(merged, before)
        assert not any("lora" in name for name in server.weights)
    torch.testing.assert_close(base.model.layers[0].mlp.up_proj.base_layer.weight, before, rtol=0, atol=0)


def test_an_adapter_is_handed_over_onto_its_base(server: FakeServer, tmp_path: Path) -> None:
    model = tiny(rank=2)
    loaded: list[dict[str, torch.Tensor]] = []

    def keep(path: str, answer: Any) -> Any:
        if path in ("/collective_rpc", "/v1/load_lora_adapter"):
            loaded.append(server.weights)
        return answer

    server.change = keep
    with closing(sampler(tmp_path, server, model=model, sync=WeightSync.lora)) as vllm:
        paths = ["/v1/models", "/collective_rpc", "/v1/load_lora_adapter", "/reset_prefix_cache"]
        assert server.paths() == paths
        up = model.model.get_base_model().model.layers[0].mlp.up_proj
        torch.testing.assert_close(loaded[0]["model.layers.0.mlp.up_proj.weight"], up.base_layer.weight, rtol=0, atol=0)
        assert all("lora" in name for name in loaded[1])
        vllm.update_weights()
        assert server.paths() == [*paths, *paths[2:]]
        vllm.sample(requests(1), Sampling())
        assert server.completions()[0]["model"] == "policy"


def test_what_an_adapter_cannot_carry(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"rollout\.sync=lora hands an adapter over, but model\.lora\.rank=0"):
        sampler(tmp_path, server, sync=WeightSync.lora)
    with pytest.raises(RolloutError, match=r"rows of added tokens.*rollout\.sync=disk"):
        sampler(tmp_path, server, model=tiny(rank=2, added_tokens=["<new>"]), sync=WeightSync.lora)


def test_a_folder_that_cannot_be_written(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RolloutError, match=r"weights cannot be written to .*file/weights.*rollout\.sync_dir="):
        sampler(tmp_path, server, sync_dir=str(tmp_path / "file" / "weights"))


def test_a_full_disk_leaves_nothing_behind(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(model: LanguageModel, folder: Path, **options: Any) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    with closing(sampler(tmp_path, server)) as vllm:
        monkeypatch.setattr("recipes.rollouts.vllm_weights.export_model", fill)
        with pytest.raises(RolloutError, match=r"weights cannot be written to .*No space left"):
            vllm.update_weights()
        assert vllm.policy_version == 0
        assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["version-0"]


def test_a_batch_has_one_version(server: FakeServer, tmp_path: Path) -> None:
    with closing(sampler(tmp_path, server)) as vllm, ThreadPoolExecutor(1) as other:
        server.delay_s = 0.02
        first = len(server.calls)
        batch = other.submit(vllm.sample, requests(16), Sampling())
        while len(server.calls) == first:
            time.sleep(0.001)
        vllm.update_weights()
        assert {completion.policy_version for completion in batch.result()} == {0}
        assert server.running_at_reload == 0
        assert server.paths()[first:] == [*["/v1/completions"] * 16, "/collective_rpc", "/reset_prefix_cache"]
        assert {completion.policy_version for completion in vllm.sample(requests(2), Sampling())} == {1}
