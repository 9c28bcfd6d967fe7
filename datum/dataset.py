"""Pieces of rows, and a set of them that is a sequence of Datums."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from datum.datum import Datum
from datum.errors import DataError
from datum.rows import Row

__all__ = ["DatumSet", "Piece"]


@dataclass(slots=True)
class Piece:
    """Consecutive tokens of one row, still unshifted.

    Attributes:
        ids: [n] int32, n >= 2.
        weights: [n] float32; the first entry is never used.
        fields: Side inputs, each [n] float32.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    fields: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def datum(self) -> Datum:
        """The training example of n - 1 positions: this is where the shift happens. Its tensors are its own."""
        ids = torch.from_numpy(self.ids.astype(np.int64))
        inputs = {"target_tokens": ids[1:], "weights": torch.from_numpy(self.weights[1:].copy())}
        inputs |= {name: torch.from_numpy(values[1:].copy()) for name, values in self.fields.items()}
        return Datum(ids[:-1], inputs)


class DatumSet(Sequence[Datum]):
    """Encoded rows as a sequence of Datums.

    The tokens of all pieces lie end to end in a few flat arrays; a Datum is cut out when it is asked for.

    Attributes:
        lengths: [N] int64, positions of each Datum.
        rows: The rows that carry an `answer`, for evaluation by generation.
        sources: (number of Datums, weight) of each entry of a list of paths; its Datums are consecutive.
        fingerprint: Hash of all ids, weights, side inputs and sources.
        keys: Keys of `loss_fn_inputs` of every Datum.
    """

    def __init__(
        self, pieces: Sequence[Piece], *, rows: Sequence[Row] = (), sources: Sequence[tuple[int, float]] | None = None
    ) -> None:
        """Store pieces; all must have the same side inputs.

        Raises:
            DataError: No pieces.
        """
        if not pieces:
            raise DataError("a data set needs at least one Datum, got none")
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self.rows = list(rows)
        self.sources = [(len(pieces), 1.0)] if sources is None else list(sources)
        self.lengths: npt.NDArray[np.int64] = sizes - 1
        self._starts = np.concatenate(([0], np.cumsum(sizes)))
        self._ids = np.concatenate([piece.ids for piece in pieces])
        self._weights = np.concatenate([piece.weights for piece in pieces])
        names = sorted(pieces[0].fields)
        self._fields = {name: np.concatenate([piece.fields[name] for piece in pieces]) for name in names}
        self.keys = ("target_tokens", "weights", *names)
        self.fingerprint = self._hash()

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Datum: ...
    @overload
    def __getitem__(self, index: slice) -> list[Datum]: ...
    def __getitem__(self, index: int | slice) -> Datum | list[Datum]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of a data set of {len(self)} Datums")
        index %= len(self)
        span = slice(self._starts[index], self._starts[index + 1])
        fields = {name: values[span] for name, values in self._fields.items()}
        return Piece(self._ids[span], self._weights[span], fields).datum()

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.sources, list(self._fields)]).encode())
        for array in (self._starts, self._ids, self._weights, *self._fields.values()):
            digest.update(array.data)
        return digest.hexdigest()
