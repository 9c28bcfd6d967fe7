"""How a run ends: what a loop raises or notes so that the process leaves with the right exit code.

| code | meaning |
| --- | --- |
| 0 | done |
| 2 | the configuration, the data or the model is wrong, and no optimizer step was taken |
| 1 | anything else; the last good checkpoint is kept |
| 130, 143 | after SIGINT, SIGTERM |
"""

__all__ = ["StopRun", "first_step_taken", "note_first_step", "reset"]

_first_step_taken = False  # one flag a process, because the exit code belongs to the process


class StopRun(Exception):
    """End the run with a message of a line or two and no traceback.

    Args:
        code: Exit code, for example 143 after SIGTERM.
        message: What happened and what is left, for the screen and the log.
    """

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


def note_first_step() -> None:
    """Say that the optimizer is about to step: from now on no error means exit code 2. Cheap enough for every step."""
    global _first_step_taken
    _first_step_taken = True


def first_step_taken() -> bool:
    """Whether `note_first_step` was called in this process since the run began."""
    return _first_step_taken


def reset() -> None:
    """Begin a run in this process."""
    global _first_step_taken
    _first_step_taken = False
