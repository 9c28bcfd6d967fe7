"""What a run of `recipes.grpo` says of itself: the objective before the first step, rollouts, how it ended."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from conf.policy import WARM_UP_FALLBACK, GRPOConfig, Overlong, Unfinished, ZeroVariance
from recipes.environments.environment import Environment
from recipes.losses.explain import objective_text, on_policy_note, worked_example
from recipes.losses.policy import PolicyLoss
from recipes.models.build import LanguageModel
from recipes.rollouts.build import Rollouts
from recipes.rollouts.collect import RolloutBatch
from recipes.rollouts.record import rollout_table
from recipes.training.metrics import read_metrics
from recipes.training.notes import announce_model, outside_the_promise
from recipes.training.run import write_json

__all__ = ["announce", "conclude", "explain_first_step", "show_rollouts"]

log = logging.getLogger(__name__)

_NEAR_ZERO = 0.05  # a loss that makes people ask whether anything is trained

_ZERO_VARIANCE = {
    ZeroVariance.keep: "kept: their tokens count in the denominators",
    ZeroVariance.drop: "dropped: their tokens count in no denominator",
    ZeroVariance.refill: "dropped and replaced by further prompts, up to rollout.max_refills rounds",
}


def announce(
    config: GRPOConfig,
    environment: Environment,
    language_model: LanguageModel,
    rollouts: Rollouts,
    loss: PolicyLoss,
    accelerator: Accelerator,
) -> None:
    """Say before the first step what will be trained, and by which objective."""
    announce_model(language_model, accelerator)
    rows = getattr(config.model, "rows", None)
    if rows == WARM_UP_FALLBACK and not config.environment._target_.startswith(WARM_UP_FALLBACK.rpartition(".")[0]):
        log.warning(
            "the model was warmed up on %s, not on this environment's answers, so rewards may be rare: give "
            "model.rows=<function (seed) -> chat rows>, or start from a model of your own (model=hf model.name=…)",
            rows,
        )
    lengths = [len(ids) for ids in rollouts.collector.prompts.ids]
    log.info(
        "environment: %s, %d problems to train on, %d held out; prompts of %d to %d tokens; rewards %s",
        environment.name,
        len(environment.train),
        len(environment.heldout),
        min(lengths),
        max(lengths),
        ", ".join(f"{reward.weight:g} x {name}" for name, reward in environment.rewards.items()),
    )
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    per_step = config.train.global_batch_size or samples
    log.info(
        "plan: %d steps; a rollout batch is %d prompts x %d completions = %d, trained in %d update(s) of %d",
        rollouts.batches.num_steps,
        config.rollout.prompts_per_step,
        config.rollout.group_size,
        samples,
        config.updates_per_batch,
        per_step,
    )
    eps, std = config.advantage.eps, config.advantage.std.value
    text = objective_text(
        loss, config.advantage.name, group_size=config.rollout.group_size, samples=per_step, eps=eps, std=std
    )
    log.info("objective:\n  %s", text.replace("\n", "\n  "))
    log.info("  groups without variance are %s", _ZERO_VARIANCE[config.rollout.zero_variance])
    for rule in reward_rules(config):
        log.info("  %s", rule)
    if rollouts.reference is not None:
        log.info("  ref: %s", "the base, adapters off" if rollouts.reference.is_base else "a frozen copy of the model")
    log.info("%s", worked_example(loss, config.advantage.name, eps, std))
    if config.rollout.max_staleness > 0:
        log.info(
            "asynchronous: batches are sampled while training steps, at most %d policy version(s) old; such a run does "
            "not resume bit for bit",
            config.rollout.max_staleness,
        )
    for reason in outside_the_promise(config, is_moe=language_model.is_moe):
        log.warning("layout invariance is not promised here: %s", reason)


def reward_rules(config: GRPOConfig) -> list[str]:
    """What becomes of the reward of a completion that is cut off or long, in words."""
    rollout, rules = config.rollout, []
    if config.environment.unfinished == Unfinished.zero:
        rules.append("reward of a completion that is cut off: 0 (environment.unfinished=zero)")
    if rollout.overlong == Overlong.mask:
        rules.append("a completion that is cut off is not trained; its reward stays in the baseline (overlong=mask)")
    if rollout.overlong == Overlong.penalty and rollout.penalty_tokens is not None:
        start = rollout.max_new_tokens - rollout.penalty_tokens
        rules.append(
            f"reward less (length - {start}) / {rollout.penalty_tokens} from {start} tokens on, at most 1 less"
        )
    return rules


def explain_first_step(row: Mapping[str, Any]) -> None:
    """Say after the first update why its loss may be 0."""
    if row["train/loss"] is None:
        log.info("first update: skipped, since no token was left to train")
        return
    loss, norm = row["train/loss"], row["train/grad_norm"]
    log.info("first update: loss %.3g, gradient norm %.3g, on policy: %s", loss, norm, row["ratio/on_policy"])
    if norm == 0:
        log.info("note: no advantage differs from 0 in this batch, so nothing was learnt from it")
    elif row["ratio/on_policy"] and abs(loss) < _NEAR_ZERO:
        log.info("%s", on_policy_note())


def show_rollouts(config: GRPOConfig, batch: RolloutBatch, step: int, rollouts: Rollouts) -> None:
    """Log a table of the newest batch's last rollouts, every `rollout.show_every` batches."""
    options = config.rollout
    if options.show and options.show_every and batch.index % options.show_every == 0 and batch.groups:
        log.info("%s", rollout_table(batch.rollouts[-options.show :], f"rollouts of step {step}"))


def conclude(run_dir: Path, environment: Environment, accelerator: Accelerator) -> None:
    """Log the way from the first numbers to the last ones, write data_ledger.json, and say where the run lies."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    for key in ("eval/accuracy", "eval/sampled_accuracy", "eval/reward"):
        values = [row[key] for row in rows if row.get(key) is not None]
        if len(values) > 1:
            log.info("held-out %-17s %8.4f before, %8.4f after", key.removeprefix("eval/"), values[0], values[-1])
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if len(rewards) > 1:
        log.info("reward of a batch          %8.4f first,  %8.4f last", rewards[0], rewards[-1])
    totals = {
        name: sum(row.get(f"rollout/{name}") or 0 for row in rows)
        for name in ("groups", "dropped_zero_std", "dropped_no_baseline", "dropped_stale", "abstained", "masked")
    }
    tokens = {
        name: sum(row.get(f"rollout/{name}") or 0 for row in rows) for name in ("sampled_tokens", "trained_tokens")
    }
    errors = sum(row.get("reward/errors") or 0 for row in rows)
    log.info(
        "groups: %d trained, %d dropped without variance, %d without a baseline, %d stale; completions: %d abstained, "
        "%d masked; %d reward errors",
        *totals.values(),
        errors,
    )
    left = tokens["sampled_tokens"] - tokens["trained_tokens"]
    log.info("tokens: %d sampled = %d trained + %d masked or in dropped groups", *tokens.values(), left)
    if tokens["sampled_tokens"] and not tokens["trained_tokens"]:
        log.warning(
            "NOTHING WAS TRAINED: every completion abstained, was masked or was dropped; final/ is the first model"
        )
    if accelerator.is_main_process:
        problems = {"problems": len(environment.train), "heldout": len(environment.heldout)}
        write_json(run_dir / "data_ledger.json", problems | totals | tokens | {"reward_errors": errors})
    log.info("run folder: %s", run_dir)
