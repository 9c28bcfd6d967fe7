"""SIGINT and SIGTERM as a flag that a loop looks at between steps."""

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first SIGINT or SIGTERM is kept in `signal` instead of ending the process.

    A second signal does what it does by default, so that a hung run can still be stopped. Outside the main thread,
    where Python takes no handlers, nothing is caught.

        with Interrupt() as interrupt:
            for step in steps:
                ...
                if interrupt.signal is not None:
                    save()
                    raise StopRun(128 + interrupt.signal, "interrupted after a checkpoint")

    Attributes:
        signal: Number of the caught signal, None until one came.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._catch) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
