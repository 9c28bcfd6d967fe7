"""From the data options to Datums: rows for training, held-out rows, questions to be answered, and the ledgers."""

from dataclasses import dataclass

from conf.schema import DataConfig, HubDataConfig, Layout, Scope, SFTConfig
from datum.encode import RowEncoder
from datum.errors import DataError
from datum.ledger import Ledger
from datum.loader import DatumLoader
from datum.rows import Row, read_hub, read_rows
from datum.sources import DatumSet, encode_rows, hold_out
from recipes.losses.loss import Loss
from recipes.models.build import LanguageModel
from recipes.training.answers import Question
from recipes.training.ranks import rank_and_world


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


@dataclass(frozen=True)
class Rows:
    """Rows as they were read, before any model is there.

    Attributes:
        train: Rows for training.
        heldout: Rows for evaluation; may be empty.
    """

    train: list[Row]
    heldout: list[Row]


def read_data(config: SFTConfig) -> Rows:
    """Read and split the rows that the options name.

    Raises:
        DataError: Naming the file and line.
    """
    data, form = config.data, config.data.format.value
    if isinstance(data, HubDataConfig):
        hub = {"id": data.path, "subset": data.subset, "revision": data.revision, "format": form}
        train = list(read_hub(**hub, split=data.split, max_rows=data.max_rows))
        if data.eval_split is not None:
            return Rows(train, list(read_hub(**hub, split=data.eval_split)))
    else:
        train = list(read_rows(data.path, format=form, max_rows=data.max_rows))
    if data.eval_path is not None:
        return Rows(train, list(read_rows(data.eval_path, format=form)))
    if data.eval_fraction > 0:
        return Rows(*hold_out(train, data.eval_fraction, config.train.seed))
    return Rows(train, [])


def encode_data(rows: Rows, config: SFTConfig, language_model: LanguageModel) -> Data:
    """Turn rows into Datums with the model's tokenizer.

    Raises:
        DataError: Naming the row.
    """
    encoder = _encoder(config.data, language_model)
    train = encode_rows(rows.train, encoder)
    if not rows.heldout:
        return Data(train, encoder.ledger, None, None, [])
    heldout_encoder = _encoder(config.data, language_model)
    heldout = encode_rows(rows.heldout[: config.eval.max_rows], heldout_encoder)
    prompts = [(heldout_encoder.generation_prompt(row), row.data) for row in heldout.rows]
    questions = [Question(*prompt, row) for prompt, row in prompts if prompt is not None]
    return Data(train, encoder.ledger, heldout, heldout_encoder.ledger, questions)


def require_fit(data: Data, language_model: LanguageModel, loss: Loss) -> None:
    """Refuse data that this model or this loss cannot take.

    Raises:
        DataError: Names the field, or the longest Datum.
    """
    for name in loss.required_fields:
        if name not in data.train.keys:
            raise DataError(
                f"the loss reads {name!r}, which the rows do not have; they have {', '.join(data.train.keys)}. Give "
                f"token rows a column {name!r}, or choose another loss"
            )
    longest, limit = int(data.train.lengths.max()), language_model.max_positions
    if limit is not None and longest > limit:
        raise DataError(
            f"the longest Datum has {longest} positions, the model's position embeddings end at {limit}: lower "
            "data.max_length and choose data.overlong"
        )


def token_budget(config: SFTConfig) -> int | None:
    """Tokens of a packed microbatch; None for the padded layout."""
    if config.collate.layout != Layout.packed:
        return None
    return config.collate.max_tokens or max(4096, config.data.max_length)


def build_loader(config: SFTConfig, data: Data) -> DatumLoader:
    """The order of the Datums over steps, and this rank's microbatches of each; completes the ledger."""
    rank, world_size = rank_and_world()
    loader = DatumLoader(
        data.train,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size or 0,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
        packed=config.collate.layout == Layout.packed,
        microbatch_size=config.train.microbatch_size,
        max_tokens=token_budget(config),
        packing=config.collate.packing.value,
        fixed_rows=config.attention.scope == Scope.xdoc,
        pad_seq_len_divisible=config.collate.pad_seq_len_divisible,
        rank=rank,
        world_size=world_size,
    )
    loader.count_positions(data.ledger)
    return loader


def _encoder(config: DataConfig, language_model: LanguageModel) -> RowEncoder:
    return RowEncoder(
        language_model.tokenizer,
        format=config.format.value,
        mask=None if config.mask is None else config.mask.value,
        max_length=config.max_length,
        overlong=config.overlong.value,
        chat_template=config.chat_template,
        vocab_size=language_model.vocab_size,
    )
