"""The ledger: what became of every row, every token and every computed position. Nothing is dropped silently.

Over one pass of the source:

    rows in            = kept + dropped (by reason)
    source tokens      = trained + masked + truncated + dropped
    computed positions = trained + masked - kept pieces + resampled + padding

A kept row is one piece, or several under overlong=split. A piece of n tokens has n - 1 positions: its first token is
never a target, so it counts as masked. `resampled` is what the weights of a mixture add to one epoch, or leave out of
it; without weights it is 0.

    rows [1,2,3] and [4,5] in one row of 4 positions: 5 = 3 trained + 2 masked; 4 = 3 + 2 - 2 kept pieces + 1 padding
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ledger"]


@dataclass
class Ledger:
    """Counts of one pass over the source; `computed_positions` is None until a loader has laid out an epoch.

    Attributes:
        rows_in: Rows read.
        rows_kept: Rows of which at least one piece is trained on.
        rows_dropped: Other rows, by reason: too_short, no_target, overlong.
        source_tokens: Tokens of all rows, as the template and the tokenizer made them.
        trained_tokens: Tokens of kept pieces that are targets of weight other than 0.
        masked_tokens: The other tokens of kept pieces, their first ones included.
        truncated_tokens: Tokens cut off kept rows under overlong=truncate.
        dropped_tokens: Tokens of dropped rows and dropped pieces.
        kept_pieces: Datums.
        pieces_dropped: Pieces of kept rows that are not trained on, by reason.
        computed_positions: Positions of all batches of one epoch, over all ranks, padding included.
        padding_positions: Those that hold no token.
        resampled_positions: Positions that source weights add to the epoch (negative: leave out).
        notes: Remarks on rows that were kept, with the number of rows.
    """

    rows_in: int = 0
    rows_kept: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    source_tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    truncated_tokens: int = 0
    dropped_tokens: int = 0
    kept_pieces: int = 0
    pieces_dropped: Counter[str] = field(default_factory=Counter)
    computed_positions: int | None = None
    padding_positions: int | None = None
    resampled_positions: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Raise unless the three equations hold (the third once positions are counted).

        Raises:
            RuntimeError: An equation fails; both sides are in the text. It is a defect of the program, not of the data.
        """
        dropped = self.rows_dropped.total()
        tokens = self.trained_tokens + self.masked_tokens + self.truncated_tokens + self.dropped_tokens
        equations = [
            ("rows in", self.rows_in, "kept + dropped", self.rows_kept + dropped),
            ("source tokens", self.source_tokens, "trained + masked + truncated + dropped", tokens),
        ]
        if self.computed_positions is not None and self.padding_positions is not None:
            positions = self.trained_tokens + self.masked_tokens - self.kept_pieces + self.resampled_positions
            equations.append(
                (
                    "computed positions",
                    self.computed_positions,
                    "trained + masked - kept pieces + resampled + padding",
                    positions + self.padding_positions,
                )
            )
        for left, got, right, expected in equations:
            if got != expected:
                raise RuntimeError(f"the data ledger does not add up: {left} {got} is not {right} {expected}")

    def merge(self, other: "Ledger") -> "Ledger":
        """The counts of two disjoint passes together. Positions are added only if both have them."""
        total: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            total[item.name] = None if mine is None or theirs is None else mine + theirs
        return Ledger(**total)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and dicts, for JSON."""
        return {
            item.name: dict(value) if isinstance(value := getattr(self, item.name), Counter) else value
            for item in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Ledger":
        """Inverse of `as_dict`."""
        values: dict[str, Any] = {
            key: Counter(value) if isinstance(value, Mapping) else value for key, value in data.items()
        }
        return cls(**values)

    def render(self) -> str:
        """A short table, ready to print."""
        lines = [
            _line("rows in", self.rows_in, kept=self.rows_kept, dropped=self.rows_dropped.total()),
            _line(
                "source tokens",
                self.source_tokens,
                trained=self.trained_tokens,
                masked=self.masked_tokens,
                truncated=self.truncated_tokens,
                dropped=self.dropped_tokens,
            ),
        ]
        if self.computed_positions is not None and self.padding_positions is not None:
            parts = {"trained": self.trained_tokens, "masked": self.masked_tokens, "kept pieces": -self.kept_pieces}
            if self.resampled_positions:
                parts["resampled"] = self.resampled_positions
            lines.append(_line("computed positions", self.computed_positions, **parts, padding=self.padding_positions))
        for title, counts in [
            ("rows dropped", self.rows_dropped),
            ("pieces dropped", self.pieces_dropped),
            ("rows noted", self.notes),
        ]:
            lines += [f"{title:<20}{n:>14,}   {reason}" for reason, n in sorted(counts.items())]
        return "\n".join(lines)


def _line(title: str, total: int, **parts: int) -> str:
    terms = [f"{'-' if n < 0 else '+'} {abs(n):,} {name.replace('_', ' ')}" for name, n in parts.items()]
    return f"{title:<20}{total:>14,} = " + " ".join(terms).removeprefix("+ ")
