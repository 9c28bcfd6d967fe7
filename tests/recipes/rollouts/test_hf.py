"""rollout=hf: what a completion is does not depend on its batch, and its log-probabilities are the trainer's."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conf.schema import Backend, Layout, LoraConfig
from datum import Datum, collate_datums
from recipes.models.build import LanguageModel
from recipes.rollouts import generate
from recipes.rollouts.generate import draw, read_decoding
from recipes.rollouts.hf import HFSampler
from recipes.rollouts.noise import batch_uniforms
from recipes.rollouts.sampler import Completion, RolloutError, SampleRequest, Sampling
from tests.recipes.models.families import VOCABULARY, axes_of, build, documents, family_config

NEW = 9
TOLERANCE = 1e-5  # absolute and relative: other rows change the order in which float32 sums are taken


def family(name: str, *, layout: Layout = Layout.padded, **options: Any) -> LanguageModel:
    return build(family_config(name, **options), axes=axes_of(name), layout=layout)


def requests_of(*lengths: int, samples: int = 3, new: int = NEW, seed: int = 0) -> list[SampleRequest]:
    """Groups of requests; the first prompt begins with ids that often mean padding or an end."""
    prompts = documents(lengths or (5, 7, 5, 9, 1), seed)
    prompts[0] = [0, 2, *prompts[0][2:]]
    return [
        SampleRequest(tuple(ids), p, s, max_new_tokens=new) for p, ids in enumerate(prompts) for s in range(samples)
    ]


def assert_equal(got: Sequence[Completion], wanted: Sequence[Completion], tolerance: float = TOLERANCE) -> None:
    assert [c.ids for c in got] == [c.ids for c in wanted]
    assert [c.is_finished for c in got] == [c.is_finished for c in wanted]
    for a, b in zip(got, wanted):
        np.testing.assert_allclose(np.array(a.logprobs), np.array(b.logprobs), rtol=tolerance, atol=tolerance)


def trainer_logprobs(
    language_model: LanguageModel,
    requests: Sequence[SampleRequest],
    completions: Sequence[Completion],
    temperature: float,
    *,
    packed: bool,
) -> Tensor:
    """What the trainer's forward says about the sampled ids, completions end to end."""
    datums = []
    for request, completion in zip(requests, completions):
        ids = [*request.prompt_ids, *completion.ids]
        weights = [0.0] * (len(request.prompt_ids) - 1) + [1.0] * len(completion.ids)
        inputs = {"target_tokens": ids[1:], "weights": weights}
        datums.append(Datum(ids[:-1], inputs))
    batch = collate_datums(datums, packed=packed)
    with torch.no_grad():
        scores = language_model.scoring(batch, batch["labels"], batch["weights"] != 0, temperature=temperature)
    return scores.logprobs


# Completions stand alone


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "qwen2_vl", "mamba2", "falcon_h1"])
def test_completions_depend_on_neither_batch_nor_order_nor_others(name: str) -> None:
    language_model = family(name)
    requests = requests_of()
    tolerance = 1e-4 if name == "gpt_oss" else TOLERANCE  # clamped and scaled experts amplify rounding
    wanted = HFSampler(language_model, seed=1).sample(requests, Sampling(0.8))
    assert len({c.ids for c in wanted}) > len(wanted) // 2
    for batch_size in (1, 4):
        got = HFSampler(language_model, seed=1, batch_size=batch_size).sample(requests, Sampling(0.8))
        assert_equal(got, wanted, tolerance)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()[:7]
    got = HFSampler(language_model, seed=1).sample([requests[i] for i in order], Sampling(0.8))
    assert_equal(got, [wanted[i] for i in order], tolerance)


def test_a_completion_may_be_continued() -> None:
    """The rest of a rollout, asked for with what it has so far as prompt, is what it would have been anyway."""
    sampler = HFSampler(family("llama"), seed=0)
    sampler.stops = set()
    whole = requests_of(new=NEW)
    wanted = sampler.sample(whole, Sampling())
    rest = [
        replace(r, prompt_ids=r.prompt_ids + c.ids[:4], position=4, max_new_tokens=NEW - 4)
        for r, c in zip(whole, wanted)
    ]
    got = sampler.sample(rest, Sampling())
    assert [c.ids for c in got] == [c.ids[4:] for c in wanted]


def test_seed_stream_and_step_change_completions() -> None:
    language_model = family("llama")
    requests = requests_of()
    first = HFSampler(language_model, seed=0).sample(requests, Sampling())
    assert HFSampler(language_model, seed=0).sample(requests, Sampling()) == first
    assert HFSampler(language_model, seed=1).sample(requests, Sampling()) != first
    for change in ({"stream": "eval"}, {"step": 1}):
        assert HFSampler(language_model, seed=0).sample([replace(r, **change) for r in requests], Sampling()) != first


def test_limits_are_each_requests_own() -> None:
    sampler = HFSampler(family("llama"), seed=0)
    requests = requests_of(samples=20)
    wanted = sampler.sample(requests, Sampling(1.5))
    limits = [1 + i % NEW for i in range(len(requests))]
    got = sampler.sample([replace(r, max_new_tokens=n) for r, n in zip(requests, limits)], Sampling(1.5))
    assert [c.ids for c in got] == [c.ids[:n] for c, n in zip(wanted, limits)]
    assert [c.is_finished for c in got] == [c.is_finished and len(c.ids) <= n for c, n in zip(wanted, limits)]


def test_prompts_are_read_once_and_ended_rows_leave() -> None:
    language_model = family("llama")
    sampler = HFSampler(language_model, seed=0)
    sampler.stops = set()
    shapes = []
    embedding = language_model.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, inputs, _output: shapes.append(tuple(inputs[0].shape)))
    (ids,) = documents((6,))
    sampler.sample([SampleRequest(tuple(ids), 0, s, max_new_tokens=1 + s) for s in range(8)], Sampling())
    hook.remove()
    # The prompt; 7 of 8 rows go on, then 6, 5; with 4 of 8 the batch is halved.
    assert shapes == [(1, 6), (8, 1), (8, 1), (8, 1), (4, 1), (4, 1), (2, 1), (1, 1)]


def test_no_requests_give_no_completions() -> None:
    assert HFSampler(family("llama"), seed=0).sample([], Sampling()) == []


# The trainer's log-probabilities


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2", "mistral"])
def test_logprobs_are_the_trainers(name: str, packed: bool) -> None:
    language_model = family(name, layout=Layout.packed if packed else Layout.padded)
    sampler = HFSampler(language_model, seed=0)
    requests = requests_of()
    for temperature in (0.5, 1.0, 1.7):
        completions = sampler.sample(requests, Sampling(temperature))
        got = torch.tensor([value for c in completions for value in c.logprobs])
        wanted = trainer_logprobs(language_model, requests, completions, temperature, packed=packed)
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_logprobs_with_adapters_are_the_trainers(packed: bool) -> None:
    layout = Layout.packed if packed else Layout.padded
    language_model = family("llama", layout=layout, lora=LoraConfig(rank=4))
    plain = HFSampler(language_model, seed=0).sample(requests_of(), Sampling())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in language_model.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    completions = HFSampler(language_model, seed=0).sample(requests_of(), Sampling())
    assert completions != plain
    got = torch.tensor([value for c in completions for value in c.logprobs])
    wanted = trainer_logprobs(language_model, requests_of(), completions, 1.0, packed=packed)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_logprobs_under_autocast_are_the_trainers() -> None:
    language_model = family("llama")

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    completions = HFSampler(language_model, seed=0, autocast=autocast).sample(requests_of(), Sampling())
    got = torch.tensor([value for c in completions for value in c.logprobs])
    with autocast():
        near = trainer_logprobs(language_model, requests_of(), completions, 1.0, packed=False)
    exact = trainer_logprobs(language_model, requests_of(), completions, 1.0, packed=False)
    assert (got - near).abs().mean() < 0.5 * (got - exact).abs().mean()


# Stops


def test_stops_are_a_set_and_end_a_completion() -> None:
    language_model = family("llama")
    generation = language_model.model.generation_config
    assert generation is not None
    generation.eos_token_id = [11, 30]
    sampler = HFSampler(language_model, seed=0)
    assert sampler.stops == {11, 30, 2}  # the tokenizer ends with 2
    endless = HFSampler(language_model, seed=0)
    endless.stops = set()
    requests = requests_of(samples=12)
    ends = set()
    for got, whole in zip(sampler.sample(requests, Sampling(1.5)), endless.sample(requests, Sampling(1.5))):
        end = next((i + 1 for i, token in enumerate(whole.ids) if token in sampler.stops), NEW)
        assert got.ids == whole.ids[:end]
        assert len(got.logprobs) == len(got.ids)
        assert got.is_finished == (got.ids[-1] in sampler.stops)
        assert not whole.is_finished
        ends.add(got.ids[-1])
    assert ends > {11, 30, 2}  # and some were cut


def test_an_end_at_the_very_limit_is_an_end() -> None:
    sampler = HFSampler(family("llama"), seed=0)
    requests = requests_of(samples=12)
    finished = [(r, c) for r, c in zip(requests, sampler.sample(requests, Sampling(1.5))) if c.is_finished]
    assert finished
    short = [replace(r, max_new_tokens=len(c.ids)) for r, c in finished]
    assert_equal(sampler.sample(short, Sampling(1.5)), [c for _, c in finished])


# Drawing


def test_temperature_0_is_greedy_with_logprobs_at_1() -> None:
    language_model = family("llama")
    sampler = HFSampler(language_model, seed=0)
    requests = requests_of(samples=1)
    completions = sampler.sample(requests, Sampling(0.0, top_p=0.5, top_k=1))
    for request, completion in zip(requests, completions):
        prompt = torch.tensor([request.prompt_ids])
        whole = language_model.model.generate(  # type: ignore[operator]
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
        assert whole[0, prompt.shape[1] :].tolist() == list(completion.ids)
    got = torch.tensor([value for c in completions for value in c.logprobs])
    wanted = trainer_logprobs(language_model, requests, completions, 1.0, packed=False)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert Sampling(0.0, top_p=0.5, top_k=1).logprob_kind == "full"


def test_temperature_divides_logits_before_the_softmax() -> None:
    """Logits [2, 0] at 0.5 -> log 1 / (1 + e^-4)."""
    ids, logprobs = draw(torch.tensor([[2.0, 0.0]]), torch.tensor([0.3], dtype=torch.float64), Sampling(0.5))
    assert ids.tolist() == [0]
    assert logprobs.tolist() == pytest.approx([-0.018150], abs=1e-6)


def test_the_logprob_is_that_of_the_sampled_id() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.1, 0.2]])).expand(3, 3)
    ids, logprobs = draw(logits, torch.tensor([0.69, 0.79, 0.81], dtype=torch.float64), Sampling())
    assert ids.tolist() == [0, 1, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.7, 0.1, 0.2])


@given(
    u=st.floats(0, 1, exclude_max=True),
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=1, max_size=9).filter(any),
)
def test_an_id_of_probability_0_is_never_drawn(u: float, weights: list[float]) -> None:
    logits = torch.log(torch.tensor([weights] * 3))
    numbers = torch.tensor([u, 0.0, 1 - 2.0**-53], dtype=torch.float64)
    ids, logprobs = draw(logits, numbers, Sampling())
    assert all(weights[i] > 0 for i in ids.tolist())
    assert torch.isfinite(logprobs).all()


@given(
    seed=st.integers(0, 99),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1e-9, 0.3, 0.7, 0.95, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_top_k_then_top_p_leave_a_renormalised_distribution(
    seed: int, top_k: int, top_p: float, temperature: float
) -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    p = torch.softmax(logits[0].double() / temperature, 0)
    order = p.argsort(descending=True).tolist()[: top_k or None]
    total = sum(float(p[i]) for i in order)
    kept: list[int] = []
    for i in order:
        if not kept or sum(float(p[j]) for j in kept) / total < top_p:
            kept.append(i)
    mass = sum(float(p[i]) for i in kept)
    sampling = Sampling(temperature, top_p, top_k)
    numbers = torch.arange(4000, dtype=torch.float64) / 4000
    ids, logprobs = draw(logits.expand(4000, 8), numbers, sampling)
    assert {i for i in kept if p[i] / mass > 1e-3} <= set(ids.tolist()) <= set(kept)
    torch.testing.assert_close(logprobs, (p[ids] / mass).log().float(), rtol=1e-4, atol=1e-5)
    assert sampling.logprob_kind == ("renormalised" if top_k or top_p < 1 else "full")


def test_ties_are_broken_by_id() -> None:
    ids, logprobs = draw(torch.zeros(4, 6), torch.arange(4).double() / 4, Sampling(top_k=2))
    assert ids.tolist() == [0, 0, 1, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.5] * 4)


def test_pieces_draw_what_the_whole_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    numbers = torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = draw(logits, numbers, Sampling())
    monkeypatch.setattr(generate, "_CHUNK", 21)
    for a, b in zip(draw(logits, numbers, Sampling()), whole):
        assert torch.equal(a, b)


def chi_square(ids: Sequence[int], p: Tensor) -> float:
    """Of ids with an expected count of at least 5; the rest is one class."""
    expected = p.double() * len(ids)
    counts = torch.bincount(torch.tensor(ids), minlength=len(p)).double()
    large = expected >= 5
    rest = float(expected[~large].sum())
    value = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    return value + (float(counts[~large].sum()) - rest) ** 2 / max(rest, 5.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_first_tokens_have_the_models_frequencies(temperature: float) -> None:
    language_model = family("cohere")  # its logits are flat
    (ids,) = documents((6,))
    requests = [SampleRequest(tuple(ids), i // 8, i % 8, max_new_tokens=1) for i in range(8000)]
    completions = HFSampler(language_model, seed=0, batch_size=4000).sample(requests, Sampling(temperature))
    with torch.no_grad():
        logits = language_model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    p = torch.softmax(logits / temperature, 0)
    assert chi_square([c.ids[0] for c in completions], p) < 101.9  # 99.9 % with 62 degrees of freedom, more than here
    assert chi_square([c.ids[0] for c in completions], p.roll(1)) > 300


def test_frequencies_of_positions_and_samples() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 2
    requests = [SampleRequest((1,), prompt, sample) for prompt in range(100) for sample in range(8)]
    numbers = torch.from_numpy(batch_uniforms(5, requests, 16)).flatten()
    ids, _ = draw(logits.expand(len(numbers), 20), numbers, Sampling())
    assert chi_square(ids.tolist(), torch.softmax(logits, 0)) < 45.3  # 99.9 % with 20 degrees of freedom


# The model


def test_the_model_is_left_as_it_was() -> None:
    language_model = family("llama")
    model = language_model.model
    layer = model.get_submodule("model.layers.0")
    layer.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    sampler = HFSampler(language_model, seed=0)
    sampler.sample(requests_of(), Sampling())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None and not p.is_inference() for p in model.parameters())
    model(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits.sum().backward()
    with pytest.raises(ValueError, match="prompt is empty"):
        sampler.sample([SampleRequest((), 0, 0)], Sampling())
    assert model.training


def test_dropout_is_off_while_sampling() -> None:
    requests = requests_of()
    wanted = HFSampler(family("gpt2"), seed=0).sample(requests, Sampling())
    assert HFSampler(family("gpt2", dropout=0.5), seed=0).sample(requests, Sampling()) == wanted


def train_a_little(language_model: LanguageModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in language_model.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_the_models_own_weights_are_seen_at_once() -> None:
    language_model = family("llama")
    sampler = HFSampler(language_model, seed=0)
    first = sampler.sample(requests_of(), Sampling())
    train_a_little(language_model)
    sampler.update_weights()
    second = sampler.sample(requests_of(), Sampling())
    assert [c.ids for c in first] != [c.ids for c in second]
    assert {c.policy_version for c in first} == {0}
    assert {c.policy_version for c in second} == {1}


@pytest.mark.parametrize("rank", [0, 4])
def test_a_copy_changes_when_weights_are_handed_over(rank: int) -> None:
    language_model = family("llama", lora=LoraConfig(rank=rank))
    sampler = HFSampler(language_model, seed=0, own_copy=True)
    first = sampler.sample(requests_of(), Sampling())
    train_a_little(language_model)
    assert sampler.sample(requests_of(), Sampling()) == first
    sampler.update_weights()
    wanted = HFSampler(language_model, seed=0).sample(requests_of(), Sampling())
    # Bit for bit: weights and batches are the same.
    assert [replace(c, policy_version=0) for c in sampler.sample(requests_of(), Sampling())] == wanted
    assert sampler.policy_version == 1
    assert all(p.requires_grad == ("lora_" in n or not rank) for n, p in language_model.model.named_parameters())


def test_a_copy_samples_while_the_model_trains() -> None:
    language_model = family("llama")
    sampler = HFSampler(language_model, seed=0, own_copy=True, batch_size=4)
    wanted = {0: sampler.sample(requests_of(), Sampling())}
    got: list[list[Completion]] = []
    is_done = threading.Event()

    def keep_sampling() -> None:
        while not is_done.is_set() or len(got) < 2:
            got.append(sampler.sample(requests_of(), Sampling()))

    thread = threading.Thread(target=keep_sampling)
    thread.start()
    optimizer = torch.optim.SGD(language_model.model.parameters(), lr=0.05)
    for _ in range(3):
        assert torch.is_grad_enabled()
        language_model.model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.std().backward()
        optimizer.step()
        assert language_model.model.training
        sampler.update_weights()
        wanted[sampler.policy_version] = HFSampler(language_model, seed=0, batch_size=4).sample(
            requests_of(), Sampling()
        )
    is_done.set()
    thread.join()
    for completions in got:
        (version,) = {c.policy_version for c in completions}
        assert [replace(c, policy_version=0) for c in completions] == wanted[version]


def test_compiled_layers_run_uncompiled() -> None:
    language_model = family("llama")
    wanted = HFSampler(language_model, seed=0).sample(requests_of(), Sampling())

    def backend(*_: Any) -> Any:
        raise AssertionError("compiled")

    for i in range(2):
        language_model.model.get_submodule(f"model.layers.{i}").compile(backend=backend)
    for own_copy in (False, True):
        assert HFSampler(language_model, seed=0, own_copy=own_copy).sample(requests_of(), Sampling()) == wanted


# Ways to decode


@pytest.mark.parametrize("backend", [Backend.eager, Backend.sdpa, Backend.document_sdpa])
def test_plain_attention_has_a_cache_and_padding(backend: Backend) -> None:
    language_model = build(family_config("mistral"), backend=backend)
    decoding = read_decoding(language_model.model)
    assert decoding.has_cache
    assert decoding.has_padding


@pytest.mark.parametrize("name", ["qwen2_vl", "mamba2", "falcon_h1"])
def test_several_axes_and_recurrence_are_not_padded(name: str) -> None:
    language_model = family(name)
    decoding = read_decoding(language_model.model, axes_of(name))
    assert decoding.has_cache
    assert not decoding.has_padding
    assert decoding.reason


def test_without_a_cache_whole_prefixes_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    language_model = family("llama")
    wanted = HFSampler(language_model, seed=0).sample(requests_of(), Sampling())
    body = language_model.model.get_submodule("model")
    forward = body.forward

    def forgetful(**inputs: Any) -> Any:
        return forward(**{**inputs, "cache": None, "use_cache": False, "attention_mask": None})

    monkeypatch.setattr(body, "forward", forgetful)
    sampler = HFSampler(language_model, seed=0, batch_size=4)
    assert "LlamaForCausalLM with a cache: a cached step differs from reading the whole prefix" in caplog.text
    assert_equal(sampler.sample(requests_of(), Sampling()), wanted)


# Messages


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest((), 0, 0), "request 1: the prompt is empty; a completion needs at least one token before it"),
        (SampleRequest((3,), 0, 0, max_new_tokens=0), "request 1: max_new_tokens=0; accepted are integers from 1"),
        (SampleRequest((3, VOCABULARY), 0, 0), "request 1: the prompt has id 61; the model has ids 0 to 60"),
        (
            SampleRequest((3,) * 60, 0, 0, max_new_tokens=5),
            "request 1: a prompt of 60 tokens and max_new_tokens=5 need 65 positions; the model has 64: "
            "shorten the prompt or rollout.max_new_tokens",
        ),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused(request_: SampleRequest, message: str) -> None:
    sampler = HFSampler(family("gpt2"), seed=0)
    with pytest.raises(ValueError, match=message) as caught:
        sampler.sample([SampleRequest((3,), 0, 0), request_], Sampling())
    assert str(caught.value) == message
    assert sampler.sample([SampleRequest((3,) * 60, 0, 0, max_new_tokens=4)], Sampling())


def test_logits_that_are_not_finite_are_an_error() -> None:
    language_model = family("llama")
    sampler = HFSampler(language_model, seed=0)
    with torch.no_grad():
        language_model.model.get_submodule("model.norm").weight.fill_(torch.nan)  # type: ignore[operator]
    with pytest.raises(RolloutError, match=r"logits that are not finite \(policy version 0\)"):
        sampler.sample(requests_of(), Sampling())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: accepted are finite numbers from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0: accepted are numbers above 0 up to 1"),
        ({"top_k": -1}, "top_k=-1: accepted are integers from 0"),
    ],
)
def test_options_of_sampling_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
