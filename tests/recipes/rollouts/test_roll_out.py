"""Turns, masks and Datums of rollouts: ids in, ids out, observations that weigh nothing; batches and their age."""

import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.policy import HFRolloutConfig, Unfinished
from conf.schema import TinyModelConfig
from datum import collate_datums
from datum.errors import DataError
from recipes.environments.environment import Environment, Problem, WeightedReward
from recipes.losses.aggregate import count_batch
from recipes.models.tiny import build
from recipes.rollouts.batches import RolloutBatches, drop_stale
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.collect import Collector, Prompts, RolloutBatch, has_zero_variance
from recipes.rollouts.roll_out import Attempt, roll_out
from recipes.rollouts.rollout import Rollout, to_datum
from recipes.rollouts.sampler import Completion, SampleRequest, Sampling


@pytest.fixture(scope="module")
def tokenizer():
    return build(TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1), 0)[1]


@pytest.fixture
def encoder(tokenizer):
    return ChatEncoder(tokenizer, {tokenizer.eos_token_id})


class Scripted:
    """A sampler that gives what it is told, and remembers what it was asked."""

    def __init__(self, *turns: Sequence[int]):
        self.turns = list(turns)
        self.requests: list[SampleRequest] = []
        self.policy_version = 0

    def sample(self, requests, sampling):
        self.requests += requests
        ids = self.turns.pop(0)
        finished = ids[-1] == 2
        return [Completion(tuple(ids), tuple(-0.5 for _ in ids), finished, self.policy_version) for _ in requests]

    def update_weights(self):
        self.policy_version += 1

    def close(self):
        pass


class Tool(Environment):
    def reply(self, problem, completions):
        return [{"role": "tool", "content": f"seen {len(completions)}"}] if len(completions) < 2 else None


def tool_environment(**options):
    problem = Problem("p", ({"role": "user", "content": "go"},), {"answer": "x"})
    return problem, Tool("tool", [problem], [], {"r": WeightedReward("recipes.a.b")}, **options)


def attempt(encoder, problem):
    return Attempt(problem, encoder.prompt_ids(problem.messages), prompt=3, sample=1)


def run(encoder, environment, problem, sampler, **options):
    options = {"step": 0, "max_new_tokens": 8, "context": None} | options
    return roll_out([attempt(encoder, problem)], environment, sampler, encoder, Sampling(), **options)[0]


def test_observations_weigh_nothing_and_sampled_ids_are_kept_as_they_were(encoder, tokenizer):
    problem, environment = tool_environment(max_turns=3)
    apart = [id for letter in " is" for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert tokenizer(" is", add_special_tokens=False)["input_ids"] != apart  # encoding again would give other ids
    sampler = Scripted([*apart, 2], [7, 2])
    rollout = run(encoder, environment, problem, sampler)
    first = len(apart) + 1
    observed = len(rollout.ids) - first - 2
    assert rollout.ids[:first] == [*apart, 2] and rollout.ids[-2:] == [7, 2]
    assert rollout.sampled == [1] * first + [0] * observed + [1, 1]
    assert len(rollout.logprobs) == len(rollout.ids) and set(rollout.logprobs[first:-2]) == {0.0}
    reply = "<|im_end|>\n<|im_start|>tool\nseen 1<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.ids) == f" is{reply}{tokenizer.decode([7])}<|im_end|>"
    assert [request.position for request in sampler.requests] == [0, first + observed]
    assert sampler.requests[1].prompt_ids == (*rollout.prompt_ids, *rollout.ids[:-2])
    batch = collate_datums([to_datum(rollout)])
    assert count_batch(batch).weight_total == first + 2
    assert batch["weights"][0, len(rollout.prompt_ids) - 1 :].tolist() == [float(s) for s in rollout.sampled]


def test_roles_give_the_shifted_mask():
    rollout = Rollout("p", 0, 0, (1, 1), [5, 6, 7, 8, 9], [1, 1, 0, 0, 1], [-1.0, -1.0, 0.0, 0.0, -1.0], advantage=1.0)
    datum = to_datum(rollout)
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 1, 1, 0, 0, 1]
    assert count_batch(collate_datums([datum])).weight_total == 3


def test_a_completion_that_is_cut_off_ends_the_rollout(encoder):
    problem, environment = tool_environment(max_turns=3)
    rollout = run(encoder, environment, problem, Scripted([7, 8]))
    assert not rollout.is_finished and rollout.ids == [7, 8]


def test_a_reply_that_would_pass_the_context_counts_as_cut_off(encoder):
    problem, environment = tool_environment(max_turns=3)
    length = len(encoder.prompt_ids(problem.messages))
    rollout = run(encoder, environment, problem, Scripted([7, 2]), context=length + 12)
    assert not rollout.is_finished and rollout.ids == [7, 2]


def test_an_environment_that_raises_fails_its_rollout_alone(encoder):
    class Broken(Environment):
        def reply(self, problem, completions):
            raise RuntimeError("no")

    problem, _ = tool_environment()
    environment = Broken("broken", [problem], [], {"r": WeightedReward("recipes.a.b")}, max_turns=2)
    assert run(encoder, environment, problem, Scripted([7, 2])).failed


def test_any_of_several_stop_ids_ends_a_text(tokenizer):
    encoder = ChatEncoder(tokenizer, {2, 9})
    assert encoder.text([7, 8, 9]) == tokenizer.decode([7, 8]) == encoder.text([7, 8, 2]) == encoder.text([7, 8])


def test_a_prompt_without_tokens_is_refused(tokenizer):
    class Bare:
        chat_template = None

        def __call__(self, text):
            return {"input_ids": []}

    with pytest.raises(DataError, match="problem 3: the prompt has no tokens"):
        ChatEncoder(Bare(), {2}).prompt_ids([{"role": "user", "content": ""}], "problem 3")


def group(version: int, place: int = 0) -> list[Rollout]:
    return [Rollout("p", place, sample, (1,), policy_version=version, reward=float(sample)) for sample in range(2)]


def test_old_groups_are_dropped_and_counted():
    batch = RolloutBatch(0, 0, groups=[group(1), group(2), group(3)])
    drop_stale(batch, version=3, max_staleness=1)
    assert len(batch.stale) == 1
    assert [g[0].policy_version for g in batch.groups] == [2, 3]


def test_variance_is_of_the_rewards_that_are_there():
    members = [*group(0), Rollout("p", 0, 2, (1,), reward=None)]
    assert not has_zero_variance(members)
    members[1].reward = 0.0
    assert has_zero_variance(members)


def test_a_batch_survives_json_bit_for_bit():
    rollout = Rollout("p", 0, 0, (1, 2), [3], [1], [torch.tensor(-1 / 3).item()], row={"set": {1}}, reward=1 / 3)
    batch = RolloutBatch(4, 9, groups=[[rollout]], dropped=[group(0)])
    back = RolloutBatch.from_state(json.loads(json.dumps(batch.state_dict())))
    assert (back.index, back.next_place) == (4, 9)
    assert back.rollouts[0].logprobs == rollout.logprobs and back.rollouts[0].prompt_ids == (1, 2)
    assert back.rollouts[0].reward == rollout.reward


@given(count=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_problem_comes_once_an_epoch(count, seed):
    class Words:
        def prompt_ids(self, messages, where):
            return (1,)

    problems = [Problem(str(i), ({"role": "user", "content": "x"},), {}) for i in range(count)]
    prompts = Prompts(problems, Words(), seed)
    ids = [prompts.attempts(place, 1)[0].problem.id for place in range(2 * count)]
    assert sorted(ids[:count]) == sorted(ids[count:]) == sorted(problem.id for problem in problems)


def test_an_error_while_sampling_ahead_reaches_the_training_thread(encoder):
    problem, environment = tool_environment()

    class Failing(Scripted):
        def sample(self, requests, sampling):
            raise OSError("gone")

    sampler = Failing()
    collector = Collector(
        Prompts([problem], encoder, 0),
        environment,
        None,
        sampler,
        encoder,
        HFRolloutConfig(prompts_per_step=1, group_size=2),
        unfinished=Unfinished.zero,
    )
    batches = RolloutBatches(collector, sampler, num_steps=3, updates_per_batch=1, max_staleness=1)
    with batches, pytest.raises(OSError, match="gone"):
        batches.next()
