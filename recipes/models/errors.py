"""What this package raises when a model or an attention backend cannot do what is asked."""

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model cannot be had, or cannot do what is asked: what was asked, why not, and what is possible instead."""
