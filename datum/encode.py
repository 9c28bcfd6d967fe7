"""Rows -> Datums: rows are tokenised and weighed, cut by the over-length policy, and counted in a ledger."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datum.dataset import DatumSet, Piece
from datum.datum import Datum
from datum.drafts import WeightedTokens, tokenize
from datum.errors import DataError
from datum.forms import RowReader
from datum.ledger import Ledger
from datum.order import shuffled
from datum.rows import Row, checked_row

__all__ = ["OVERLONG", "DatumSet", "RowEncoder", "encode_rows", "hold_out"]

OVERLONG = ("error", "drop", "truncate", "split")
"""Accepted values of `overlong`."""

_BATCH = 512  # rows whose texts are tokenised in one call


class RowEncoder:
    """Turns rows into Datums and keeps the ledger of what became of them.

    Args:
        tokenizer: A Transformers tokenizer; None is enough for tokens rows.
        format: One of `datum.rows.FORMATS`.
        mask: One of `datum.forms.MASKS`, or None: assistant for messages, completion for prompt/completion, all for
            text; tokens rows always keep their own weights.
        max_length: Largest number of positions of a Datum; a row of n tokens has n - 1.
        overlong: error, drop the row, truncate its end, or split it into pieces of max_length + 1 tokens.
        chat_template: Jinja file in place of the tokenizer's chat template.
        vocab_size: Rows of the model's embedding; ids from there on are refused. None: not checked.

    Attributes:
        ledger: Counts over all rows encoded so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: str = "auto",
        mask: str | None = None,
        max_length: int = 1024,
        overlong: str = "error",
        chat_template: str | Path | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if overlong not in OVERLONG:
            raise ValueError(f"overlong={overlong!r}: accepted are {', '.join(OVERLONG)}")
        if max_length < 1:
            raise ValueError(f"max_length={max_length}: accepted are whole numbers from 1")
        self.ledger = Ledger()
        self._reader = RowReader(tokenizer, format, mask, chat_template)
        self._max_length = max_length
        self._overlong = overlong
        self._vocab_size = vocab_size

    def encode(self, row: Row) -> list[Datum]:
        """Encode one row: no Datum if it is dropped, several if it is split.

        Raises:
            DataError: The row cannot be used; the text names it.
        """
        return [piece.datum() for _, pieces in self.encode_pieces([row]) for piece in pieces]

    def encode_pieces(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Piece]]]:
        """Encode rows in order, tokenising many at a time."""
        rows = map(checked_row, rows)
        while batch := list(islice(rows, _BATCH)):
            drafts = [self._reader.draft(row) for row in batch]
            tokens = iter(tokenize(self._reader.tokenizer, [text for draft in drafts for text in draft.texts]))
            for row, draft in zip(batch, drafts, strict=True):
                yield row, self._cut(row, draft.finish(list(islice(tokens, len(draft.texts)))))

    def generation_prompt(self, row: Row) -> tuple[list[int], str] | None:
        """What to generate from, and what to expect, for a row that says what the answer is.

        Returns:
            Token ids of the prompt as the model sees it when it is asked for the last assistant turn or the completion,
            and the row's `answer`; None for a row without `answer`, and for forms that have no prompt.
        """
        return self._reader.generation_prompt(checked_row(row))

    def _cut(self, row: Row, tokens: WeightedTokens) -> list[Piece]:
        """Apply the over-length policy, drop what cannot be trained on, and book it all."""
        whole = Piece(
            self._checked_ids(row, tokens.ids),
            np.asarray(tokens.weights, np.float32),
            {name: np.asarray(values, np.float32) for name, values in tokens.fields.items()},
        )
        spans, reason = self._spans(row, len(whole))
        pieces, dropped = [], []
        for start, stop in spans:
            if (why := _useless(whole.weights[start:stop])) is not None:
                dropped.append((why, stop - start))
            else:
                fields = {name: values[start:stop] for name, values in whole.fields.items()}
                pieces.append(Piece(whole.ids[start:stop], whole.weights[start:stop], fields))
        self._book(len(whole), pieces, dropped, reason, tokens.notes)
        return pieces

    def _spans(self, row: Row, count: int) -> tuple[list[tuple[int, int]], str | None]:
        """Parts of the row to look at, and the reason if there are none."""
        size = self._max_length + 1
        if count <= size:
            return [(0, count)], None
        if self._overlong == "drop":
            return [], "overlong"
        if self._overlong == "truncate":
            return [(0, size)], None
        if self._overlong == "split":
            edges = [*range(0, count, size), count]
            if edges[-1] - edges[-2] == 1 and size > 2:
                edges[-2] -= 1  # a single token is no Datum: it gets its neighbour
            return list(pairwise(edges)), None
        raise DataError(
            f"{row.where}: {count} tokens make {count - 1} positions, above data.max_length={self._max_length}; "
            "raise it, or choose data.overlong=drop, truncate or split"
        )

    def _book(
        self, count: int, pieces: list[Piece], dropped: list[tuple[str, int]], reason: str | None, notes: Sequence[str]
    ) -> None:
        ledger = self.ledger
        ledger.rows_in += 1
        ledger.source_tokens += count
        if not pieces:
            reasons = [why for why, _ in dropped]
            ledger.rows_dropped[reason or ("no_target" if "no_target" in reasons else "too_short")] += 1
            ledger.dropped_tokens += count
            return
        kept = sum(map(len, pieces))
        trained = sum(int(np.count_nonzero(piece.weights[1:])) for piece in pieces)
        lost = sum(size for _, size in dropped)
        ledger.rows_kept += 1
        ledger.kept_pieces += len(pieces)
        ledger.trained_tokens += trained
        ledger.masked_tokens += kept - trained
        ledger.dropped_tokens += lost
        ledger.truncated_tokens += count - kept - lost
        ledger.pieces_dropped.update(why for why, _ in dropped)
        ledger.notes.update(notes)

    def _checked_ids(self, row: Row, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        array = np.asarray(ids)
        limit = np.iinfo(np.int32).max if self._vocab_size is None else self._vocab_size
        if array.size and (array.min() < 0 or array.max() >= limit):
            index = int(np.flatnonzero((array < 0) | (array >= limit))[0])
            raise DataError(
                f"{row.where}: token {index} has the id {array[index]}, accepted are 0 to {limit - 1}, the model's "
                "vocabulary; was the row, or the tokenizer, made for another model?"
            )
        return array.astype(np.int32)


def encode_rows(rows: Iterable[Row], encoder: RowEncoder) -> DatumSet:
    """Encode rows in order; the encoder's ledger counts them and is checked.

    Raises:
        DataError: A row cannot be used; rows differ in their side inputs; nothing is left of the rows, or of an entry
            of a list of paths (the counts by reason are in the text).
    """
    pieces: list[Piece] = []
    answered: list[Row] = []
    counts: dict[int, int] = {}  # Datums of each source
    weights: dict[int, float] = {}
    example = ""
    before = encoder.ledger.rows_dropped.copy()
    for row, made in encoder.encode_pieces(rows):
        if counts and row.source < max(counts):
            raise ValueError(f"{row.where}: a row of source {row.source} after rows of a later one; keep reading order")
        counts[row.source] = counts.get(row.source, 0) + len(made)
        weights[row.source] = row.weight
        if not made:
            continue
        example = example or row.where
        if pieces and made[0].fields.keys() != pieces[0].fields.keys():
            raise DataError(
                f"{row.where}: its side inputs are {_listed(made[0])}, those of {example} are {_listed(pieces[0])}; "
                "all rows of a set need the same ones"
            )
        pieces += made
        if "answer" in row.data:
            answered.append(row)
    encoder.ledger.check()
    if not counts:
        raise DataError("the data set is empty: there are no rows")
    if any(n == 0 for n in counts.values()):
        dropped = encoder.ledger.rows_dropped - before
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
        which = "all rows" if not pieces else f"all rows of path {min(i for i in counts if not counts[i])} of the list"
        raise DataError(
            f"nothing is left to train on: {which} were dropped (rows dropped: {reasons}); "
            "see data.mask, data.max_length and data.overlong"
        )
    return DatumSet(pieces, rows=answered, sources=[(counts[i], weights[i]) for i in counts])


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into a training and an evaluation part, before encoding, both in reading order.

    The split is a function of the rows and the seed. Equal rows go to the same side, so that no evaluation row was
    trained on; round(fraction · distinct rows) distinct rows are held out, at least one.

    Raises:
        DataError: Nothing would be left for training.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}: accepted are numbers between 0 and 1")
    contents = [json.dumps(row.data, sort_keys=True, default=str) for row in rows]
    distinct = list(dict.fromkeys(contents))
    number = max(1, round(fraction * len(distinct)))
    if number >= len(distinct):
        raise DataError(
            f"data.eval_fraction={fraction} of {len(distinct)} distinct rows leaves nothing to train on; "
            "lower it, or give more rows"
        )
    held = {distinct[i] for i in shuffled(len(distinct), seed, stream=2)[:number]}
    return (
        [row for row, content in zip(rows, contents, strict=True) if content not in held],
        [row for row, content in zip(rows, contents, strict=True) if content in held],
    )


def _useless(weights: npt.NDArray[np.float32]) -> str | None:
    """Why a piece cannot be trained on."""
    if len(weights) < 2:
        return "too_short"
    return None if weights[1:].any() else "no_target"


def _listed(piece: Piece) -> str:
    return ", ".join(sorted(piece.fields)) or "none"
