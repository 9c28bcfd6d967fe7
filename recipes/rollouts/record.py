"""What is kept and shown of a rollout batch: a file of its rollouts, a table of a few, its metrics."""

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from recipes.losses.advantages import frac_zero_std
from recipes.rollouts.batches import RolloutBatches
from recipes.rollouts.build import Rollouts
from recipes.rollouts.chat import ChatEncoder
from recipes.rollouts.collect import RolloutBatch
from recipes.rollouts.rollout import Rollout

_STATISTICS = (
    *("ratio/mean", "ratio/clip_frac", "ratio/on_policy", "ratio/ess", "mismatch/kl", "mismatch/max_abs"),
    *("correction/masked_frac", "entropy/mean", "kl/ref"),
)

__all__ = ["batch_metrics", "cut_back_rollouts", "metric_names", "rollout_table", "write_rollouts"]

_BATCH_METRICS = (
    *("reward/mean", "reward/std", "reward/frac_zero_std", "reward/errors"),
    *("rollout/length_mean", "rollout/truncated_frac", "rollout/abstained", "rollout/masked"),
    *("rollout/sampled_tokens", "rollout/trained_tokens"),
    *("rollout/groups", "rollout/dropped_zero_std", "rollout/dropped_no_baseline", "rollout/dropped_stale"),
    *("rollout/policy_version", "rollout/staleness", "rollout/epoch", "time/rollout_s", "perf/rollout_tokens_per_s"),
)


def metric_names(rewards: Sequence[str]) -> list[str]:
    """Names of what a step of `recipes.grpo` measures beside `recipes.training.run.STEP_METRICS`."""
    return [*_BATCH_METRICS, *(f"reward/{name}" for name in rewards), *_STATISTICS]


def batch_metrics(batch: RolloutBatch, batches: RolloutBatches, rewards: Sequence[str]) -> dict[str, Any]:
    """Metrics of a rollout batch, over all groups that were sampled, those that are not trained included.

    Args:
        batch: The batch, advantages set.
        batches: Where it came from.
        rewards: Names of the reward functions.
    """
    groups = [*batch.groups, *batch.dropped, *batch.no_baseline, *batch.stale]
    rollouts = [rollout for group in groups for rollout in group]
    given = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [rollout.num_sampled for rollout in rollouts]
    oldest = min((rollout.policy_version for rollout in rollouts), default=batches.trained)
    metrics: dict[str, Any] = {
        "reward/mean": float(np.mean(given)) if given else None,
        "reward/std": float(np.std(given, ddof=1)) if len(given) > 1 else None,
        "reward/frac_zero_std": frac_zero_std([[rollout.reward for rollout in group] for group in groups]),
        "reward/errors": batch.errors,
        "rollout/length_mean": float(np.mean(lengths)) if lengths else None,
        "rollout/truncated_frac": float(np.mean([not r.is_finished for r in rollouts])) if rollouts else None,
        "rollout/abstained": len(rollouts) - len(given),
        "rollout/masked": sum(rollout.is_masked for rollout in batch.rollouts),
        "rollout/sampled_tokens": sum(lengths),
        "rollout/trained_tokens": sum(rollout.num_sampled for rollout in batch.rollouts if not rollout.is_masked),
        "rollout/groups": len(batch.groups),
        "rollout/dropped_zero_std": len(batch.dropped),
        "rollout/dropped_no_baseline": len(batch.no_baseline),
        "rollout/dropped_stale": len(batch.stale),
        "rollout/policy_version": oldest,
        "rollout/staleness": batches.trained - oldest,
        "rollout/epoch": batch.next_place / len(batches.collector.prompts),
        "time/rollout_s": batch.rollout_s,
        "perf/rollout_tokens_per_s": sum(lengths) / batch.rollout_s if batch.rollout_s else None,
    }
    for name in rewards:
        values = [v for v in (rollout.rewards.get(name) for rollout in rollouts) if v is not None]
        metrics[f"reward/{name}"] = float(np.mean(values)) if values else None
    return metrics


def rollout_path(run_dir: Path, step: int) -> Path:
    """File of the batch whose first update is `step`."""
    return run_dir / "rollouts" / f"step-{step:08d}.jsonl"


def write_rollouts(run_dir: Path, step: int, batch: RolloutBatch, rollouts: Rollouts) -> None:
    """Write every rollout of a batch, one JSON object a line, by temporary name and rename.

    Args:
        run_dir: Run folder.
        step: The batch's first optimizer step, from 1.
        batch: Advantages set.
        rollouts: Where they came from.
    """
    path = rollout_path(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    left_out = [*batch.dropped, *batch.no_baseline, *batch.stale]
    groups = [(r, True) for r in batch.rollouts] + [(r, False) for group in left_out for r in group]
    with aside.open("w") as file:
        for rollout, is_trained in sorted(groups, key=lambda item: (item[0].prompt, item[0].sample)):
            line = _as_line(rollout, rollouts.encoder, rollouts.collector.sampling.logprob_kind)
            line["is_trained"] = is_trained and not rollout.is_masked
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    aside.replace(path)


def _as_line(rollout: Rollout, encoder: ChatEncoder, logprob_kind: str) -> dict[str, Any]:
    line = {
        "problem": rollout.problem,
        "prompt": str(encoder.tokenizer.decode(list(rollout.prompt_ids))),
        "completion": rollout.completions[0] if len(rollout.completions) == 1 else rollout.completions,
        "prompt_ids": list(rollout.prompt_ids),
        "token_ids": rollout.ids,
        "sampled": rollout.sampled,
        "logprobs": rollout.logprobs,
        "logprob_kind": logprob_kind,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "advantage": rollout.advantage,
        "policy_version": rollout.policy_version,
        "is_finished": rollout.is_finished,
        "place": rollout.prompt,
        "sample": rollout.sample,
    }
    for name in ("old_logprobs", "ref_logprobs"):
        if getattr(rollout, name) is not None:
            line[name] = getattr(rollout, name)
    return line


def cut_back_rollouts(run_dir: Path, step: int, source: Path | None = None) -> None:
    """Remove the rollouts of later steps, and copy the earlier ones of another run that is continued here."""
    folder = run_dir / "rollouts"
    if source is not None and source.resolve() != run_dir.resolve() and (source / "rollouts").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source / "rollouts", folder)
    for path in folder.glob("step-*.jsonl") if folder.is_dir() else ():
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _ending(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"…{line[1 - width :]}"


def rollout_table(rollouts: Sequence[Rollout], title: str, *, width: int = 110) -> str:
    """A few rollouts as a table: the end of the question, the completion, reward and advantage."""
    table = Table(title=title, title_justify="left", width=width)
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, ratio=1)
    for name in ("reward", "advantage", "tokens"):
        table.add_column(name, justify="right")
    for rollout in rollouts:
        text = " / ".join(repr(completion)[1:-1] for completion in rollout.completions)
        abstains = rollout.reward is None
        table.add_row(
            _ending(rollout.question, width // 3),
            text if rollout.is_finished else f"{text} (cut off)",
            "-" if abstains else f"{rollout.reward:.3g}",
            "-" if abstains or rollout.advantage is None else f"{rollout.advantage:+.3f}",
            str(rollout.num_sampled),
            style="dim" if rollout.is_masked else None,
        )
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(table)
    return screen.getvalue().rstrip()
