"""What a run says of itself: what it trains, what it does not promise, one batch token by token, how it ended."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from conf.schema import CommonConfig, Precision, Scope, SFTConfig
from datum.loader import DatumLoader
from recipes.losses.aggregate import select_tokens
from recipes.models.build import LanguageModel
from recipes.training.data import Data
from recipes.training.metrics import read_metrics
from recipes.training.run import write_json
from recipes.training.step import StepResult

log = logging.getLogger(__name__)


def announce(
    config: SFTConfig,
    run_dir: Path,
    language_model: LanguageModel,
    data: Data,
    loader: DatumLoader,
    accelerator: Accelerator,
) -> None:
    """Say before the first step what will be trained, and write data_ledger.json."""
    if config.train.trace and loader.step < loader.num_steps:
        trace(loader.microbatches(loader.step)[0], language_model)
    announce_model(language_model, accelerator)
    log.info("data:\n%s", data.ledger.render())
    if data.heldout is not None:
        log.info("held out: %d Datums, %d with an answer to generate", len(data.heldout), len(data.questions))
    samples = min(loader.global_batch_size, len(data.train))
    log.info(
        "plan: %d steps of %d Datums, %.2f epochs", loader.num_steps, samples, loader.total_samples / loader.epoch_size
    )
    for reason in outside_the_promise(config, is_moe=language_model.is_moe):
        log.warning("layout invariance is not promised here: %s", reason)
    if accelerator.is_main_process:
        heldout = None if data.heldout_ledger is None else data.heldout_ledger.as_dict()
        write_json(run_dir / "data_ledger.json", data.ledger.as_dict() | {"heldout": heldout})


def announce_model(language_model: LanguageModel, accelerator: Accelerator) -> None:
    """Say what is trained, where, and by which choices."""
    parameters = list(language_model.scoring.parameters())
    trained, total = sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
    log.info(
        "model: %s parameters, %s trained; attention %s; %s, %d rank(s)",
        f"{total:,}",
        f"{trained:,}",
        language_model.backend,
        accelerator.device,
        accelerator.num_processes,
    )
    for note in language_model.notes:
        log.info("model: %s", note)


def trace(batch: Mapping[str, Any], language_model: LanguageModel) -> None:
    """Show a microbatch token by token, and let torch name the operation that makes a gradient NaN from now on."""
    torch.autograd.set_detect_anomaly(True)
    show_microbatch(batch, language_model.tokenizer)


def outside_the_promise(config: CommonConfig, *, is_moe: bool) -> list[str]:
    """Reasons why this run's loss and gradient may depend on layout, split or ranks beyond rounding."""
    reasons = {
        "attention=xdoc: documents of a row see each other, so the row is the sample": config.attention.scope
        == Scope.xdoc,
        "model.dropout above 0: what is dropped depends on the layout": config.model.dropout > 0
        or config.model.lora.dropout > 0,
        "train.precision=bf16: sums are rounded in another order": config.train.precision == Precision.bf16,
        f"model.dtype={config.model.dtype.value}: sums are rounded in another order": config.model.dtype.value
        != "float32",
        "mixture of experts: expert batches change shape with the layout": is_moe,
    }
    return [reason for reason, applies in reasons.items() if applies]


def show_microbatch(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, limit: int = 200) -> None:
    """Log the first positions of a microbatch: what is read, what is predicted, with which weight."""
    tokens, selected, targets = select_tokens(batch)
    weights = iter(tokens.weights.tolist())
    log.info("first microbatch, input_ids %s: position, input -> target, weight", list(batch["input_ids"].shape))
    columns = (batch["input_ids"], targets, selected)
    for position, (token, target, is_trained) in enumerate(zip(*(column.flatten().tolist() for column in columns))):
        if position == limit:
            log.info("  … %d more positions", selected.numel() - limit)
            return
        aim = f"{tokenizer.decode([target])!r}  {next(weights):g}" if is_trained else "-"
        log.info("  %5d  %r -> %s", position, tokenizer.decode([token]), aim)


def not_finite(step: int, result: StepResult, sample_ids: Sequence[int], what: str = "Datums") -> str:
    """Message for a step whose loss or gradient is not finite."""
    ids = ", ".join(map(str, sample_ids[:16])) + (", …" if len(sample_ids) > 16 else "")
    return (
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, so the update was not made "
        f"({what} [{ids}])\nthe last checkpoint is kept; train.non_finite=skip passes over such steps, "
        "debug=trace names the operation"
    )


def conclude(run_dir: Path) -> None:
    """Log the way from the first evaluation to the last one, and where the run lies."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    for key in ("eval/loss", "eval/token_accuracy", "eval/accuracy"):
        values = [row[key] for row in rows if row.get(key) is not None]
        if len(values) > 1:
            log.info("held-out %-14s %8.4f before, %8.4f after", key.removeprefix("eval/"), values[0], values[-1])
    log.info("run folder: %s", run_dir)
