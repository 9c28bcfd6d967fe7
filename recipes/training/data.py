"""From the data options to Datums: rows for training, held-out rows, questions to be answered, and the ledger."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from conf.schema import DataConfig, HubDataConfig
from datum.encode import DatumSet, RowEncoder, encode_rows, hold_out
from datum.ledger import Ledger
from datum.rows import Row, read_hub, read_rows
from recipes.training.answers import Question


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on.

    Attributes:
        train: Datums for training.
        ledger: Fate of every training row and token.
        heldout: Datums for evaluation; None without held-out rows.
        heldout_ledger: Fate of the held-out rows and tokens.
        questions: Prompts of the held-out rows that carry an `answer`.
    """

    train: DatumSet
    ledger: Ledger
    heldout: DatumSet | None
    heldout_ledger: Ledger | None
    questions: list[Question]


def load_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    seed: int,
    max_eval_rows: int | None = None,
) -> Data:
    """Read, encode and split the rows that the options name.

    Args:
        config: Data options.
        tokenizer: The model's.
        vocab_size: Rows of the model's embedding; larger ids are refused.
        seed: Chooses the rows that `data.eval_fraction` holds out.
        max_eval_rows: Use the first n held-out rows only.

    Raises:
        DataError: Naming the file and line, or the row.
    """
    rows, heldout_rows = _read(config, seed)
    encoder = _encoder(config, tokenizer, vocab_size)
    train = encode_rows(rows, encoder)
    if not heldout_rows:
        return Data(train, encoder.ledger, None, None, [])
    heldout_encoder = _encoder(config, tokenizer, vocab_size)
    chosen = heldout_rows[:max_eval_rows]
    heldout = encode_rows(chosen, heldout_encoder)
    questions = []
    for row in chosen:
        prompt = heldout_encoder.generation_prompt(row)
        if prompt is not None:
            questions.append(Question(*prompt, row.data))
    return Data(train, encoder.ledger, heldout, heldout_encoder.ledger, questions)


def _encoder(config: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> RowEncoder:
    return RowEncoder(
        tokenizer,
        format=config.format.value,
        mask=None if config.mask is None else config.mask.value,
        max_length=config.max_length,
        overlong=config.overlong.value,
        chat_template=config.chat_template,
        vocab_size=vocab_size,
    )


def _read(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows for training, and those held out."""
    form = config.format.value
    if isinstance(config, HubDataConfig):
        rows = list(read_hub(config.path, config.subset, config.split, config.revision, format=form, max_rows=config.max_rows))
        if config.eval_split is not None:
            return rows, list(read_hub(config.path, config.subset, config.eval_split, config.revision, format=form))
    else:
        rows = list(read_rows(config.path, format=form, max_rows=config.max_rows))
    if config.eval_path is not None:
        return rows, list(read_rows(config.eval_path, format=form))
    if config.eval_fraction > 0:
        return hold_out(rows, config.eval_fraction, seed)
    return rows, []
