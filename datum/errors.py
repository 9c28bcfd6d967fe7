"""What this package raises when the data, and not the program, are wrong."""

__all__ = ["DataError", "DataTypeError"]


class DataError(ValueError):
    """The data are wrong: what was got, what is accepted, and where (datum, row, file) stand in the message."""


class DataTypeError(DataError, TypeError):
    """A value of the wrong type (text, floats for token ids, a dict for a Datum); a TypeError and a ValueError."""
