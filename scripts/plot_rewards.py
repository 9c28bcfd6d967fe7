"""Draw the reward of every step of one or several runs, and what evaluations of held-out problems found.

    python -m scripts.plot_rewards outputs/grpo/* --out curve.svg

Needs matplotlib, which reasoning-gym brings along (`pip install matplotlib`).
"""

import argparse
import statistics
from pathlib import Path

from recipes.training.metrics import read_metrics

KEYS = ("reward/mean", "eval/sampled_accuracy", "eval/accuracy")


def main() -> None:
    """Read metrics.jsonl of each run, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--out", type=Path, default=None, help="picture to write (svg, png, pdf); none: the table alone"
    )
    arguments = parser.parse_args()
    curves = {run: read_metrics(run / "metrics.jsonl") for run in arguments.runs}
    print(f"{'run':40}  " + "  ".join(f"{key + ' first, last':>34}" for key in KEYS))
    last: dict[str, list[float]] = {key: [] for key in KEYS}
    for run, rows in curves.items():
        cells = []
        for key in KEYS:
            values = [row[key] for row in rows if row.get(key) is not None]
            cells.append(f"{values[0]:.3f}, {values[-1]:.3f}" if values else "-")
            last[key] += values[-1:]
        print(f"{run.name[-40:]:40}  " + "  ".join(f"{cell:>34}" for cell in cells))
    for key, values in last.items():
        if len(values) > 1:
            print(
                f"last {key}: median {statistics.median(values):.3f}, smallest {min(values):.3f}, of {len(values)} runs"
            )
    if arguments.out is not None:
        draw(curves, arguments.out)
        print(f"wrote {arguments.out}")


def draw(curves: dict[Path, list[dict]], out: Path) -> None:
    """One thin line a run for the reward of its batches, dots for held-out problems, the median thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6), constrained_layout=True)
    by_step: dict[int, list[float]] = {}
    for number, rows in enumerate(curves.values()):
        rewards = [(row["step"], row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
        for step, reward in rewards:
            by_step.setdefault(step, []).append(reward)
        axes.plot(*zip(*rewards), color="tab:blue", alpha=0.35, linewidth=0.8, label=None if number else "a run")
        held_out = [(row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None]
        if held_out:
            axes.scatter(
                *zip(*held_out), color="tab:orange", s=14, zorder=3, label=None if number else "held out, greedy"
            )
    if len(curves) > 1:
        medians = [(step, statistics.median(values)) for step, values in sorted(by_step.items())]
        axes.plot(*zip(*medians), color="tab:blue", linewidth=2, label="median")
    axes.set(xlabel="optimizer step", ylabel="reward of the batch", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
