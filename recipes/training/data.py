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


def load_data(config: SFTConfig, language_model: LanguageModel) -> Data:
    """Read, split and encode the rows that the options name.

    Raises:
        DataError: Naming the file and line, or the row.
    """
    rows, heldout_rows = _read(config.data, config.train.seed)
    encoder = _encoder(config.data, language_model)
    train = encode_rows(rows, encoder)
    if not heldout_rows:
        return Data(train, encoder.ledger, None, None, [])
    heldout_encoder = _encoder(config.data, language_model)
    heldout = encode_rows(heldout_rows[: config.eval.max_rows], heldout_encoder)
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
        global_batch_size=config.train.global_batch_size,
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


def _read(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows for training, and those held out."""
    form = config.format.value
    if isinstance(config, HubDataConfig):
        hub = {"id": config.path, "subset": config.subset, "revision": config.revision, "format": form}
        rows = list(read_hub(**hub, split=config.split, max_rows=config.max_rows))
        if config.eval_split is not None:
            return rows, list(read_hub(**hub, split=config.eval_split))
    else:
        rows = list(read_rows(config.path, format=form, max_rows=config.max_rows))
    if config.eval_path is not None:
        return rows, list(read_rows(config.eval_path, format=form))
    if config.eval_fraction > 0:
        return hold_out(rows, config.eval_fraction, seed)
    return rows, []
