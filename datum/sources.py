"""Files -> rows -> Datums: the names a program needs, in one place.

    rows, held_out = hold_out(list(read_rows("train.jsonl")), fraction=0.05, seed=0)
    encoder = RowEncoder(tokenizer, max_length=1024)
    train = encode_rows(rows, encoder)
    print(encoder.ledger.render())

Row forms, masks, policies and the ledger: docs/data.md.
"""

from datum.dataset import DatumSet
from datum.encode import RowEncoder, encode_rows, hold_out
from datum.ledger import Ledger
from datum.rows import Row, read_hub, read_rows

__all__ = ["DatumSet", "Ledger", "Row", "RowEncoder", "encode_rows", "hold_out", "read_hub", "read_rows"]
