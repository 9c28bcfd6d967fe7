"""Write question/answer chats out of reasoning-gym: <out>/{train,eval}.jsonl.

    python -m scripts.make_smollm2_data                                    # the files in recipes/demo/smollm2
    python -m scripts.make_smollm2_data --task spell_backward --options '{"max_word_len": 5}' --size 500 --out mine

Needs `pip install reasoning-gym`; training on the files does not. Each row brings what reasoning-gym needs to score a
completion: `task`, and the entry's `metadata` as JSON. No question is asked twice, so none of the evaluation file is
trained. The files are a function of the arguments and of reasoning-gym's version.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from scripts.make_demo_data import DEMO, as_jsonl

TASK = "word_sequence_reversal"
OPTIONS = {"min_words": 3, "max_words": 5}
SYSTEM = None
SIZE, EVAL_SIZE = 1024, 64
SEED = 7
CHUNK = 256  # entries generated at a time
FRUITLESS_CHUNKS = 20  # chunks without a new question, after which a task counts as exhausted


def question_rows(
    task: str = TASK,
    options: dict[str, Any] | None = None,
    *,
    size: int = SIZE,
    eval_size: int = EVAL_SIZE,
    seed: int = SEED,
    system: str | None = SYSTEM,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows, all with different questions.

    Args:
        task: Name of a reasoning-gym dataset.
        options: Its options; None: those of the shipped files.
        size: Number of training rows.
        eval_size: Number of held-out rows.
        seed: Seeds the held-out questions; those of the training rows come from other seeds.
        system: System prompt of each row; None: none, so that the chat template may add its own.

    Raises:
        ValueError: The task has fewer different questions than asked for.
    """
    options = OPTIONS if options is None else options
    seen: set[str] = set()
    held_out, train = (
        [_row(task, entry, system) for entry in _unseen(task, options, first_seed, wanted, seen)]
        for first_seed, wanted in ((seed, eval_size), (seed + 1_000_000, size))
    )
    return train, held_out


def _unseen(task: str, options: dict[str, Any], seed: int, wanted: int, seen: set[str]) -> Iterator[dict[str, Any]]:
    """`wanted` entries whose questions are not in `seen`, which grows."""
    found, fruitless = 0, 0
    for entries in _chunks(task, options, seed):
        before = found
        for entry in entries:
            if found == wanted:
                return
            question = entry["question"].strip()
            if question not in seen:
                seen.add(question)
                found += 1
                yield entry
        fruitless = 0 if found > before else fruitless + 1
        if fruitless == FRUITLESS_CHUNKS:
            raise ValueError(
                f"{task} with {options} has too few different questions: {found} new ones of {wanted} were found; "
                "ask for fewer rows, or widen the options"
            )


def _chunks(task: str, options: dict[str, Any], seed: int) -> Iterator[Iterable[dict[str, Any]]]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise SystemExit("reasoning-gym is missing: pip install reasoning-gym") from error
    for chunk in count(seed, CHUNK):  # entry i of a data set is that of seed + i
        yield islice(reasoning_gym.create_dataset(task, size=CHUNK, seed=chunk, **options), CHUNK)


def _row(task: str, entry: dict[str, Any], system: str | None) -> dict[str, Any]:
    question, answer = entry["question"].strip(), str(entry["answer"]).strip()
    opening = [] if system is None else [{"role": "system", "content": system}]
    return {
        "messages": [*opening, {"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        "answer": answer,
        "task": task,
        "metadata": json.dumps(entry["metadata"]),
    }


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", default=TASK, help="name of a reasoning-gym dataset")
    parser.add_argument("--options", type=json.loads, default=None, help="its options as JSON")
    parser.add_argument("--size", type=int, default=SIZE, help="training rows")
    parser.add_argument("--eval-size", type=int, default=EVAL_SIZE, help="held-out rows")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--system", default=SYSTEM, help="system prompt of each row")
    parser.add_argument("--out", type=Path, default=DEMO / "smollm2", help="folder to write to")
    args = parser.parse_args()
    options = args.options if args.options is not None or args.task == TASK else {}
    try:
        files = question_rows(
            args.task, options, size=args.size, eval_size=args.eval_size, seed=args.seed, system=args.system
        )
    except (ValueError, AssertionError, TypeError) as error:  # reasoning-gym's ways to refuse a task or an option
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "eval"), files, strict=True):
        path = args.out / f"{name}.jsonl"
        path.write_text(as_jsonl(rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
