"""From the options of `recipes.grpo` to its pieces, each checked before the first step."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

from conf.closed import ConfigError
from conf.policy import NEEDS_GROUP, GRPOConfig, HFRolloutConfig, Overlong, PolicyLossConfig
from conf.schema import Layout
from datum.errors import DataError
from recipes.environments.environment import Environment, Problem, WeightedReward
from recipes.environments.rewards import RewardRunner
from recipes.losses.policy import PolicyLoss
from recipes.models.build import LanguageModel
from recipes.models.scoring import base_of
from recipes.rollouts.batches import RolloutBatches
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.collect import Collector, Prompts
from recipes.rollouts.evaluation import PolicyEvaluation
from recipes.rollouts.hf import HFSampler
from recipes.rollouts.sampler import Sampler
from recipes.runtime.build import instantiate, locate
from recipes.training.answers import stop_ids
from recipes.training.ranks import rank_and_world
from recipes.training.reference import Reference

__all__ = ["Rollouts", "build_environment", "build_evaluation", "build_policy_loss", "build_rewards", "build_rollouts"]

log = logging.getLogger(__name__)


@dataclass
class Rollouts:
    """What makes rollout batches and what they are scored by.

    Attributes:
        batches: The stream of batches.
        collector: Makes them.
        sampler: The policy.
        encoder: Of conversations.
        reference: Frozen reference; None without a KL term.
        exchange: Process group in which ranks tell each other log-probabilities; None with one process.
    """

    batches: RolloutBatches
    collector: Collector
    sampler: Sampler
    encoder: ChatEncoder
    reference: Reference | None
    exchange: Any

    def close(self) -> None:
        """End the sampler and the process that computes rewards."""
        self.sampler.close()
        self.collector.rewards.close()


def build_policy_loss(config: GRPOConfig) -> PolicyLoss:
    """The loss, at the temperature of the sampler.

    Raises:
        ConfigError: It is no policy loss, or does not look at log-probabilities of samples that may be stale.
    """
    loss = instantiate(config.loss, config.allow_targets, key="loss", temperature=config.rollout.temperature)
    if not isinstance(loss, PolicyLoss):
        raise ConfigError(
            f"loss._target_={config.loss._target_} in recipes.grpo: accepted are subclasses of "
            "recipes.losses.policy.PolicyLoss"
        )
    if config.rollout.max_staleness > 0 and "logprobs" not in loss.required_fields:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} with loss._target_={config.loss._target_}: it "
            "ignores logprobs, so it would take stale samples for its own; use max_staleness=0 or another loss"
        )
    return loss


def build_environment(config: GRPOConfig) -> Environment:
    """Problems, replies and rewards.

    Raises:
        ConfigError: The target does not give an environment.
        DataError: There is no problem to train on.
    """
    key = f"environment._target_={config.environment._target_}"
    target = locate(config.environment._target_, config.allow_targets, key="environment._target_")
    try:
        environment = target(config.environment, config.train.seed)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # code of the environment's own
        raise ConfigError(
            f"{key} failed with these options ({type(error).__name__}: {error}); it is called with the options of the "
            "group and the seed"
        ) from error
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"{key} gave a {type(environment).__name__}: accepted is a recipes.environments.environment.Environment"
        )
    if not environment.rewards:
        raise ConfigError(f"{key} gives no reward: at least one is needed, the first of which is the verdict")
    wrong = [name for name, reward in environment.rewards.items() if not isinstance(reward, WeightedReward)]
    if wrong:
        raise ConfigError(f"{key}: its reward {wrong[0]!r} is no WeightedReward(function, weight)")
    for problem in (*environment.train, *environment.heldout):
        if not isinstance(problem, Problem) or not isinstance(problem.row, Mapping):
            raise ConfigError(f"{key}: {problem!r:.100} is no Problem(id, messages, row) whose row is a mapping")
    if not isinstance(environment.max_turns, int) or environment.max_turns < 1:
        raise ConfigError(f"{key} has max_turns={environment.max_turns}: accepted are whole numbers from 1")
    if not environment.train:
        raise DataError(f"environment {environment.name} has no problem to train on")
    held_out = {problem.id for problem in environment.heldout}
    if both := [problem.id for problem in environment.train if problem.id in held_out]:
        raise DataError(f"environment {environment.name}: the problem {both[0]!r} is trained and held out")
    return environment


def build_rewards(config: GRPOConfig, environment: Environment) -> RewardRunner:
    """The process that computes rewards, tried on the first problems.

    Raises:
        ConfigError: A reward function cannot be found, or has the wrong shape.
    """
    runner = RewardRunner(
        environment.rewards, timeout_s=config.environment.timeout_s, allow_targets=config.allow_targets
    )
    runner.check([problem.row for problem in environment.train[:3]])
    return runner


def build_rollouts(
    config: GRPOConfig,
    run_dir: Path,
    environment: Environment,
    rewards: RewardRunner,
    language_model: LanguageModel,
    accelerator: Accelerator,
) -> Rollouts:
    """Sampler, prompts and reference.

    Raises:
        ConfigError: No token ends a completion; a completion may be longer than the model or a packed row can hold.
        DataError: A prompt cannot be rendered.
        RolloutError: A server cannot be used.
    """
    stops = stop_ids(language_model.model, language_model.tokenizer)
    if not stops:
        raise ConfigError(
            f"model.name={config.model.name}: neither its generation config nor its tokenizer names an end token, so "
            "no completion would ever end"
        )
    if environment.max_turns > 1 and language_model.tokenizer.chat_template is None:
        raise ConfigError(
            f"environment {environment.name} has up to {environment.max_turns} turns, and the tokenizer has no chat "
            "template to write them with"
        )
    if environment.max_turns > 1 and config.rollout.overlong == Overlong.penalty:
        raise ConfigError(
            f"rollout.overlong=penalty with environment {environment.name}, which has up to {environment.max_turns} "
            "turns: the penalty is for completions of one turn; use rollout.overlong=mask or keep"
        )
    encoder = ChatEncoder(language_model.tokenizer, stops)
    prompts = Prompts(environment.train, encoder, config.train.seed)
    context = _context(language_model)
    _require_room(config, environment, prompts, context)
    has_reference = isinstance(config.loss, PolicyLossConfig) and config.loss.kl.coef > 0
    reference = Reference(language_model) if has_reference else None
    is_ahead = config.rollout.max_staleness > 0
    build = locate(config.rollout._target_, config.allow_targets, key="rollout._target_")
    options = {"seed": config.train.seed, "run_dir": run_dir, "autocast": accelerator.autocast, "own_copy": is_ahead}
    try:
        sampler: Sampler = build(config.rollout, language_model, **options)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"rollout._target_={config.rollout._target_} does not build a sampler from these options ({error}); "
            "choose one by rollout=hf or vllm"
        ) from error
    # Two threads may exchange objects at one time, and a third part gradients: each has a process group of its own.
    sampled, exchange = (dist.new_group(backend="gloo") if rank_and_world()[1] > 1 else None for _ in range(2))
    collector = Collector(
        prompts,
        environment,
        rewards,
        sampler,
        encoder,
        config.rollout,
        unfinished=config.environment.unfinished,
        context=context,
        needs_baseline=config.advantage.name in NEEDS_GROUP,
        exchange=sampled,
    )
    batches = RolloutBatches(
        collector,
        sampler,
        num_steps=_num_steps(config, len(prompts)),
        updates_per_batch=config.updates_per_batch,
        max_staleness=config.rollout.max_staleness,
        fingerprint=_fingerprint(prompts),
    )
    return Rollouts(batches, collector, sampler, encoder, reference, exchange)


def build_evaluation(
    config: GRPOConfig,
    environment: Environment,
    rollouts: Rollouts,
    language_model: LanguageModel,
    accelerator: Accelerator,
) -> PolicyEvaluation | None:
    """The evaluation that the options ask for; None where `eval.every_steps` is 0 or nothing is held out."""
    if config.eval.every_steps == 0:
        return None
    if not environment.heldout:
        log.warning("nothing is evaluated: environment %s holds no problem out", environment.name)
        return None
    sampler = rollouts.sampler
    if isinstance(config.rollout, HFRolloutConfig) and config.rollout.max_staleness > 0:  # not the copy's old weights
        sampler = HFSampler(
            language_model,
            seed=config.train.seed,
            batch_size=config.rollout.batch_size,
            autocast=accelerator.autocast,
        )
    return PolicyEvaluation(
        environment,
        rollouts.collector.rewards,
        sampler,
        rollouts.encoder,
        config.eval,
        config.rollout,
        unfinished=config.environment.unfinished,
        context=rollouts.collector.context,
        device=accelerator.device,
    )


def _num_steps(config: GRPOConfig, prompts: int) -> int:
    if config.train.max_steps is not None:
        return config.train.max_steps
    batches = -(-config.train.epochs * prompts // config.rollout.prompts_per_step)
    return batches * config.updates_per_batch


def _context(language_model: LanguageModel) -> int | None:
    text_config = base_of(language_model.model).config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    return int(positions) if positions else None


def _require_room(config: GRPOConfig, environment: Environment, prompts: Prompts, context: int | None) -> None:
    longest = max(range(len(prompts)), key=lambda i: len(prompts.ids[i]))
    length, new = len(prompts.ids[longest]), config.rollout.max_new_tokens
    if context is not None and length + new > context:
        raise DataError(
            f"problem {environment.train[longest].id}: its prompt of {length} tokens and rollout.max_new_tokens={new} "
            f"go beyond the model's context of {context}: shorten the prompt or lower max_new_tokens"
        )
    budget = config.collate.max_tokens if config.collate.layout == Layout.packed else None
    needed = length + new * environment.max_turns - 1
    if budget is not None and needed > budget:
        raise ConfigError(
            f"collate.max_tokens={budget}: a prompt of {length} tokens with {environment.max_turns} turn(s) of "
            f"rollout.max_new_tokens={new} takes up to {needed} positions, and a Datum is never cut; raise the budget"
        )


def _fingerprint(prompts: Prompts) -> str:
    """Hash of the prompts' ids and of what rewards read."""
    digest = hashlib.blake2b(digest_size=16)
    for problem, ids in zip(prompts.problems, prompts.ids, strict=True):
        digest.update(json.dumps([problem.id, ids, dict(problem.row)], default=str, sort_keys=True).encode())
    return digest.hexdigest()
