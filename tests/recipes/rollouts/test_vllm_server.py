"""rollout=vllm against a real vLLM server on the CPU; opt-in: make vllm, or pytest -m vllm.

The server runs in an environment of its own, $VLLM_VENV or .venv-vllm. It computes in float32, so that its
log-probabilities can be compared with the trainer's to rounding.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.policy import VLLMRolloutConfig, WeightSync
from conf.schema import HFModelConfig, LoraConfig, TinyModelConfig
from datum import Datum, collate_datums
from recipes.losses.aggregate import select_tokens
from recipes.models.build import LanguageModel, build_model
from recipes.models.export import export_model
from recipes.rollouts.sampler import Completion, RolloutError, SampleRequest, Sampling
from recipes.rollouts.vllm import build

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
START_S = 300
TOLERANCE = 1e-4  # of a log-probability, float32 on both sides; 1e-6 was measured

REQUESTS = [
    SampleRequest(prompt_ids=tuple(range(5, 8 + prompt)), prompt=prompt, sample=sample, max_new_tokens=16)
    for prompt in range(6)
    for sample in range(4)
]


@contextmanager
def serve(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Run a server until the block ends; its address."""
    if not (VENV / "bin" / "python").exists():
        pytest.skip(
            f"{VENV} is not there: make vllm builds it (sh scripts/make_vllm_env.sh), or VLLM_VENV names another"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["sh", str(ROOT / "scripts" / "serve_vllm.sh"), str(model), str(port)]
    command += ["--dtype", "float32", "--max-model-len", "256", *options]
    env = os.environ | {"VLLM_VENV": str(VENV), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):  # to the group: a server has workers, which may outlive it
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(timeout=30)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    start = time.monotonic()
    while process.poll() is None and time.monotonic() < start + START_S:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(f"vLLM was up after {time.monotonic() - start:.0f} s")
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start (exit code {process.poll()}):\n" + "\n".join(log.read_text().splitlines()[-30:]))


def trained(folder: Path | None, rank: int = 0, is_tied: bool = False) -> LanguageModel:
    """The model of a folder, or a new one; the heads of 32 are a size that vLLM has CPU kernels for."""
    lora = LoraConfig(rank=rank, alpha=2.0 * rank or 1.0)
    if folder is not None:
        return build_model(HFModelConfig(name=str(folder), lora=lora), seed=0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    return build_model(TinyModelConfig(lora=lora, tie_embeddings=is_tied, **shape), seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding, which a server has to be told twice."""
    return new_folder(tmp_path_factory.mktemp("served") / "tied", is_tied=True)


def new_folder(folder: Path, is_tied: bool) -> Path:
    model = trained(None, is_tied=is_tied)
    change(model, 1.0)
    export_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server that takes weights and adapters."""
    with serve(folder, folder.parent / "server.log", "--enable-lora", "--max-lora-rank", "8") as address:
        yield address


def sampler(url: str, model: LanguageModel, run_dir: Path, **options):
    return build(VLLMRolloutConfig(servers=[url], retries=1, **options), model, seed=0, run_dir=run_dir)


@torch.no_grad()
def change(model: LanguageModel, size: float, seed: int = 0) -> None:
    """Add noise to what is trained, relative to each tensor's own spread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise * max(float(parameter.std()), 0.02))


def scores(model: LanguageModel, completions: Sequence[Completion], temperature: float = 1.0) -> list[Tensor]:
    """The trainer's log-probabilities of completions of REQUESTS, by the model that the losses use."""
    datums = []
    for request, completion in zip(REQUESTS, completions, strict=True):
        ids = [*request.prompt_ids, *completion.ids]
        targets = torch.tensor([*ids[1:], 0])
        weights = torch.zeros(len(ids))
        weights[len(request.prompt_ids) - 1 : -1] = 1
        datums.append(Datum(input_ids=torch.tensor(ids), loss_fn_inputs={"target_tokens": targets, "weights": weights}))
    batch = collate_datums(datums)
    _, selected, targets = select_tokens(batch)
    model.scoring.eval()
    with torch.no_grad():
        logprobs = model.scoring(batch, targets, selected, temperature=temperature).logprobs
    return list(logprobs.split([len(completion.ids) for completion in completions]))


def difference(model: LanguageModel, completions: Sequence[Completion], temperature: float = 1.0) -> float:
    """Largest difference of a log-probability between server and trainer."""
    expected = torch.cat(scores(model, completions, temperature))
    got = torch.tensor([value for completion in completions for value in completion.logprobs])
    return float((expected - got).abs().max())


def test_a_server_with_its_defaults(tmp_path: Path) -> None:
    """raw_logprobs is vLLM's own default: good for temperature 1 alone."""
    folder = new_folder(tmp_path / "untied", is_tied=False)
    model = trained(folder)
    with (
        serve(folder, tmp_path / "server.log", "--logprobs-mode", "raw_logprobs") as url,
        closing(sampler(url, model, tmp_path)) as vllm,
    ):
        assert difference(model, vllm.sample(REQUESTS, Sampling())) < TOLERANCE
        change(model, 0.3)
        vllm.update_weights()
        assert difference(model, vllm.sample(REQUESTS, Sampling())) < TOLERANCE
        with pytest.raises(RolloutError, match=r"temperature=0\.7.*--logprobs-mode processed_logprobs"):
            vllm.sample(REQUESTS, Sampling(temperature=0.7))
        with pytest.raises(RolloutError, match="--logprobs-mode processed_logprobs"):
            vllm.sample(REQUESTS, Sampling(top_k=5))
        wrong = VLLMRolloutConfig(servers=[url], model="another/model")
        with pytest.raises(RolloutError, match=rf"serves {folder}, but rollout\.model=another/model"):
            build(wrong, model, seed=0, run_dir=tmp_path)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_are_the_trainers(url: str, folder: Path, tmp_path: Path, temperature: float) -> None:
    model = trained(folder)
    with closing(sampler(url, model, tmp_path)) as vllm:
        completions = vllm.sample(REQUESTS, Sampling(temperature=temperature))
        assert difference(model, completions, temperature) < TOLERANCE
        assert completions == vllm.sample(REQUESTS, Sampling(temperature=temperature))
        assert len({completion.ids for completion in completions}) > len(REQUESTS) // 2


def test_greedy_is_greedy(url: str, folder: Path, tmp_path: Path) -> None:
    model = trained(folder)
    with closing(sampler(url, model, tmp_path)) as vllm:
        completions = vllm.sample(REQUESTS, Sampling(temperature=0))
    assert difference(model, completions) < TOLERANCE
    for request, completion in zip(REQUESTS, completions, strict=True):
        with torch.no_grad():
            logits = model.model(torch.tensor([[*request.prompt_ids, *completion.ids]])).logits[0]
        assert completion.ids == tuple(logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist())


def test_cut_distributions_are_renormalised(url: str, folder: Path, tmp_path: Path) -> None:
    model = trained(folder)
    with closing(sampler(url, model, tmp_path)) as vllm:
        completions = vllm.sample(REQUESTS, Sampling(temperature=0.7, top_k=5))
    for request, completion in zip(REQUESTS, completions, strict=True):
        with torch.no_grad():
            logits = model.model(torch.tensor([[*request.prompt_ids, *completion.ids]])).logits[0] / 0.7
        kept = logits[len(request.prompt_ids) - 1 : -1].topk(5)
        logprobs = kept.values.log_softmax(-1)[kept.indices == torch.tensor(completion.ids)[:, None]]
        torch.testing.assert_close(logprobs, torch.tensor(completion.logprobs), rtol=0, atol=TOLERANCE)


def test_a_stop_id_is_the_last_id(url: str, folder: Path, tmp_path: Path) -> None:
    model = trained(folder)
    with closing(sampler(url, model, tmp_path)) as vllm:
        first = vllm.sample(REQUESTS, Sampling())
    stops = {completion.ids[3] for completion in first}
    model.model.generation_config.eos_token_id = sorted(stops)  # type: ignore[union-attr]
    stops.add(model.tokenizer.eos_token_id)
    with closing(sampler(url, model, tmp_path)) as vllm:
        completions = vllm.sample(REQUESTS, Sampling())
    for whole, completion in zip(first, completions, strict=True):
        end = next((i + 1 for i, token in enumerate(whole.ids) if token in stops), len(whole.ids))
        assert completion.ids == whole.ids[:end]
        assert completion.is_finished == (completion.ids[-1] in stops)
    assert any(completion.is_finished for completion in completions)


@pytest.mark.parametrize(
    ("rank", "sync"), [(0, WeightSync.disk), (4, WeightSync.disk), (4, WeightSync.lora)], ids=["disk", "merged", "lora"]
)
def test_weights_are_handed_over(url: str, folder: Path, tmp_path: Path, rank: int, sync: WeightSync) -> None:
    """Each test leaves the server with weights of its own, so construction has to replace them."""
    model = trained(folder, rank)
    with closing(sampler(url, model, tmp_path, sync=sync)) as vllm:
        before = vllm.sample(REQUESTS, Sampling())
        assert difference(model, before) < TOLERANCE
        for version in (1, 2):
            change(model, 0.3, seed=version)
            assert difference(model, before) > 100 * TOLERANCE
            start = time.perf_counter()
            vllm.update_weights()
            print(f"{sync.value} (rank {rank}): handed over in {time.perf_counter() - start:.2f} s")
            after = vllm.sample(REQUESTS, Sampling())
            assert {completion.policy_version for completion in after} == {version}
            assert [c.ids for c in after] != [c.ids for c in before]
            assert difference(model, after) < TOLERANCE
            before = after


def run_recipe(url: str, folder: Path, run_dir: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "recipes.grpo", "model=hf", f"model.name={folder}", "environment=largest_digit"]
    command += ["rollout=vllm", f"rollout.servers=[{url}]", "rollout.prompts_per_step=4", "rollout.group_size=4"]
    command += ["train.max_steps=3", "eval.every_steps=0", "environment.unfinished=score", "optim.lr=1e-3"]
    command += ["loss.correction=truncate", "rollout.temperature=0.8", f"hydra.run.dir={run_dir}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def steps_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def versions_of(run_dir: Path, step: int) -> set[int]:
    """Policy versions of a step's 16 completions."""
    lines = (run_dir / "rollouts" / f"step-{step:08d}.jsonl").read_text().splitlines()
    assert len(lines) == 16
    return {json.loads(line)["policy_version"] for line in lines}


def test_three_steps_of_the_recipe(url: str, folder: Path, tmp_path: Path) -> None:
    run_recipe(url, folder, tmp_path)
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3]
    assert [versions_of(tmp_path, step) for step in (1, 2, 3)] == [{0}, {1}, {2}]
    assert all(row["mismatch/max_abs"] < TOLERANCE for row in steps_of(tmp_path))


def test_a_resumed_run_hands_over_what_it_loaded(url: str, folder: Path, tmp_path: Path) -> None:
    run_recipe(url, folder, tmp_path, "train.max_steps=2", "checkpoint.every_steps=2")
    run_recipe(url, folder, tmp_path, "checkpoint.resume=auto")
    assert versions_of(tmp_path, 3) == {2}
    assert all(row["mismatch/max_abs"] < TOLERANCE for row in steps_of(tmp_path))


def test_sampling_while_training(url: str, folder: Path, tmp_path: Path) -> None:
    run_recipe(url, folder, tmp_path, "rollout.max_staleness=1", "train.max_steps=4")
    for step in (1, 2, 3, 4):
        versions = versions_of(tmp_path, step)
        assert len(versions) == 1
        assert versions <= {step - 2, step - 1}
