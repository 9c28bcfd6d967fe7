"""What a run says of itself: what it will do, what it does not promise, one batch token by token, how it ended."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from conf.schema import Precision, Scope, SFTConfig
from recipes.losses.aggregate import select_tokens
from recipes.training.metrics import read_metrics

log = logging.getLogger(__name__)


def outside_the_promise(config: SFTConfig, *, is_moe: bool) -> list[str]:
    """Reasons why this run's loss and gradient may depend on layout, split or ranks beyond rounding."""
    reasons = {
        "attention=xdoc: documents of a row see each other, so the packed row is the sample": config.attention.scope == Scope.xdoc,
        "model.dropout: masks differ with the layout": config.model.dropout > 0 or config.model.lora.dropout > 0,
        "train.precision=bf16: sums are rounded to bf16 in another order": config.train.precision == Precision.bf16,
        f"model.dtype={config.model.dtype.value}: weights are rounded": config.model.dtype.value != "float32",
        "mixture of experts: expert batches change shape with the layout": is_moe,
    }
    return [reason for reason, applies in reasons.items() if applies]


def show_microbatch(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, limit: int = 200) -> None:
    """Log the first positions of a microbatch: what is read, what is predicted, with which weight."""
    tokens, selected, targets = select_tokens(batch)
    weights = iter(tokens.weights.tolist())
    log.info("first microbatch, input_ids %s: position, input -> target, weight", list(batch["input_ids"].shape))
    flat = zip(batch["input_ids"].flatten().tolist(), targets.flatten().tolist(), selected.flatten().tolist(), strict=True)
    for position, (token, target, is_trained) in enumerate(flat):
        if position == limit:
            log.info("  … %d more positions", selected.numel() - limit)
            return
        aim = f"{tokenizer.decode([target])!r}  {next(weights):g}" if is_trained else "-  0"
        log.info("  %5d  %r -> %s", position, tokenizer.decode([token]), aim)


def conclude(run_dir: Path, num_parameters: int) -> None:
    """Log the way from the first evaluation to the last one, and where the run lies."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    for name, key in {"answer accuracy": "eval/accuracy", "token accuracy": "eval/token_accuracy", "loss": "eval/loss"}.items():
        values = _present(rows, key)
        if len(values) > 1:
            log.info("held-out %s: %.4f before, %.4f after", name, values[0], values[-1])
    log.info("trained %s parameters; run folder: %s", f"{num_parameters:,}", run_dir)


def _present(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]
