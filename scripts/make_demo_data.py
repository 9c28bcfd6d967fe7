"""Write the demo's rows: sums of two two-digit numbers as chats, recipes/demo/{train,eval}.jsonl.

    python -m scripts.make_demo_data

There are 4,095 unordered pairs of numbers from 10 to 99. A seeded shuffle holds HELD_OUT of them out: neither order of
such a pair is trained, and the evaluation file asks each once, in a random order. The training file asks the others in
both orders. The files are a function of the constants below; a test compares them byte by byte with a fresh set.
"""

import argparse
import json
import random
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo"
NUMBERS = range(10, 100)
HELD_OUT = 256  # pairs
SEED = 20250101


def sum_row(first: int, second: int) -> dict[str, Any]:
    """One chat that asks for a sum; `answer` is what an evaluation by generation compares with."""
    answer = str(first + second)
    return {
        "messages": [
            {"role": "user", "content": f"What is {first} + {second}?"},
            {"role": "assistant", "content": answer},
        ],
        "answer": answer,
    }


def demo_rows(seed: int = SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows."""
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(NUMBERS, 2))
    rng.shuffle(pairs)
    held_out = [sum_row(*rng.sample(pair, 2)) for pair in pairs[:HELD_OUT]]
    train = [sum_row(*ordered) for pair in pairs[HELD_OUT:] for ordered in sorted({pair, pair[::-1]})]
    rng.shuffle(train)
    return train, held_out


def as_jsonl(rows: list[dict[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write train.jsonl and eval.jsonl to")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "eval"), demo_rows(), strict=True):
        path = folder / f"{name}.jsonl"
        path.write_text(as_jsonl(rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
