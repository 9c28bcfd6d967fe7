"""What a person sees while a run goes: a bar in a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

_LINE_EVERY_S = 5.0
_BAR = 30  # characters of a value of 1


class TrainingProgress:
    """Progress of a training loop, as a context manager.

    Args:
        total: Steps of the run.
        done: Steps taken before a resume.
        watch: Metric shown beside the loss, with a bar of its length where lines are printed: a curve that grows
            downwards. For numbers from 0 to 1.
        shown: False on ranks that stay silent.
    """

    def __init__(self, total: int, done: int = 0, *, watch: str | None = None, shown: bool = True):
        self.total = total
        self.watch = watch
        self.watched: float | None = None  # the newest value; not every step has one
        self.shown = shown
        self.started = time.monotonic()
        self.first = done
        self.last_line = 0.0
        self.bar: Progress | None = None
        if shown and sys.stdout.isatty():
            self.bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[watched]}loss {task.fields[loss]}  {task.fields[rate]} tokens/s"),
                TimeRemainingColumn(),
            )
            self.task = self.bar.add_task("train", total=total, completed=done, loss="-", rate="-", watched="")

    def __enter__(self) -> "TrainingProgress":
        if self.bar is not None:
            self.bar.start()
            self._follow_stdout()  # log lines go above the bar
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            self._follow_stdout()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a finished step by its metrics row."""
        if not self.shown:
            return
        step = row["step"]
        loss, rate = _number(row.get("train/loss")), f"{row.get('perf/tokens_per_s') or 0:,.0f}"
        if self.watch is not None and row.get(self.watch) is not None:
            self.watched = row[self.watch]
        watched = "" if self.watch is None else f"{self.watch.partition('/')[0]} {_number(self.watched)}  "
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=loss, rate=rate, watched=watched)
            return
        now = time.monotonic()
        if step in (self.first + 1, self.total) or now - self.last_line >= _LINE_EVERY_S:
            self.last_line = now
            left = (now - self.started) / (step - self.first) * (self.total - step)
            lr = row.get("train/lr")
            if self.watch is not None:
                length = round(_BAR * min(max(self.watched or 0.0, 0.0), 1.0))
                curve = "█" * length + "·" * (_BAR - length)
                log.info("step %4d/%d  %s%s  loss %s  %.0f s left", step, self.total, watched, curve, loss, left)
                return
            log.info("step %d/%d  loss %s  lr %.3g  %s tokens/s  %.0f s left", step, self.total, loss, lr, rate, left)

    @staticmethod
    def _follow_stdout() -> None:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setStream(sys.stdout)


def _number(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.4f}".replace("-0.0000", "0.0000")
