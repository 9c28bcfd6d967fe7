"""`model=tiny_warm`: the tiny model after a short supervised warm-up, so that rewards have something to choose among.

A model with random weights never answers in a form that can be rewarded. The warm-up teaches the form from rows whose
answers are mostly wrong; the right answer is left for the rewards to find.
"""

import logging

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conf.closed import ConfigError
from conf.schema import Backend, DecayingSchedulerConfig, OptimConfig, TinyWarmConfig
from datum.encode import RowEncoder, encode_rows
from datum.loader import DatumLoader
from datum.rows import Row
from recipes.losses.cross_entropy import CrossEntropy
from recipes.models import tiny
from recipes.models.scoring import ScoringModel
from recipes.runtime.build import locate
from recipes.training.optim import build_optimizer, learning_rates
from recipes.training.step import train_step

__all__ = ["build"]

log = logging.getLogger(__name__)

_GRAD_CLIP = 1.0


def build(config: TinyWarmConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the tiny model and train it on `rows(seed)` for `warmup_steps` steps; a function of options and seed.

    Args:
        config: Sizes of the model, rows and length of the warm-up. Rows are drawn several times, from seeds that follow
            each other: where their answers are random, none can be learnt by heart.
        seed: Of the weights, the rows and their order; the global generator is left as it was.

    Returns:
        Float32 model on the CPU and its tokenizer.

    Raises:
        ConfigError: `rows` names no such function.
    """
    model, tokenizer = tiny.build(config, seed)
    if config.rows is None:
        raise ConfigError("model.rows is required: give model.rows=<function (seed) -> chat rows to warm up on>")
    draw = locate(config.rows, [config.rows.partition(".")[0]], key="model.rows")  # allowed or not is checked before
    try:
        rows = [row for number in range(config.warmup_draws) for row in draw(seed + number)]
    except Exception as error:  # code of the user's own
        raise ConfigError(
            f"model.rows={config.rows} failed ({type(error).__name__}: {error}): accepted is a function "
            "(seed) -> chat rows"
        ) from error
    encoder = RowEncoder(tokenizer, format="messages", mask=None, max_length=config.max_positions, overlong="error")
    data = encode_rows([Row(row, f"{config.rows} row {index}") for index, row in enumerate(rows)], encoder)
    loader = DatumLoader(
        data, seed=seed, global_batch_size=config.warmup_batch_size, max_steps=config.warmup_steps, packed=False
    )
    model.set_attn_implementation(Backend.sdpa.value)
    scoring = ScoringModel(model, backend=Backend.sdpa).train()
    optimizer = build_optimizer(scoring, OptimConfig(lr=config.warmup_lr, beta2=0.98))
    schedule = DecayingSchedulerConfig(name="linear", warmup_steps=min(50, config.warmup_steps // 4))
    learning_rate = learning_rates(schedule, config.warmup_lr, config.warmup_steps)
    loss = CrossEntropy()
    log.info("warm-up: %d supervised steps on %d rows of %s", config.warmup_steps, len(rows), config.rows)
    with torch.enable_grad():
        for index, microbatches in loader:
            result = train_step(scoring, microbatches, loss, optimizer, lr=learning_rate(index), grad_clip=_GRAD_CLIP)
            if index == 0 or (index + 1) % 100 == 0 or index + 1 == config.warmup_steps:
                log.info("warm-up step %d/%d  loss %.4f", index + 1, config.warmup_steps, result.loss or 0.0)
    return model, tokenizer
