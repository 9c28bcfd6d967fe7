"""One rank of test_parallel: gradients of a step whose microbatches are spread over the ranks."""

import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conf.schema import Layout
from datum import Datum, collate_datums
from recipes.losses.aggregate import select_tokens
from tests.recipes.models.families import build, documents, family_config

LENGTHS = (5, 7, 3, 9, 2)
# Microbatches of each rank; the second rank's last one has no weight.
SHARES = [[[0, 1], [2]], [[3, 4], []]]


def microbatch(indices: list[int], packed: bool) -> dict[str, Any]:
    """The Datums of these indices, or a filler."""
    ids = documents(LENGTHS)
    rows = [(ids[i], 1.0 + i) for i in indices] or [([0], 0.0)]
    fields = [{"target_tokens": [*row[1:], 5], "weights": [weight] * len(row)} for row, weight in rows]
    return collate_datums([Datum(row, loss_fn_inputs=more) for (row, _), more in zip(rows, fields)], packed=packed)


def step(model: torch.nn.Module, shares: list[list[int]], world: int, packed: bool) -> None:
    """Backward through the weighted sum of each microbatch; gradients are exchanged at the last."""
    for index, indices in enumerate(shares):
        batch = microbatch(indices, packed)
        tokens, selected, targets = select_tokens(batch)
        last = index == len(shares) - 1
        with nullcontext() if last or world == 1 else model.no_sync():
            (model(batch, targets, selected, coefficients=tokens.weights).weighted_sum * world).backward()


def gradients(
    family: str, shares: list[list[int]], world: int, packed: bool, **options: Any
) -> dict[str, torch.Tensor]:
    """Gradients by name after one step."""
    built = build(family_config(family, **options), layout=Layout.packed if packed else Layout.padded)
    model = DistributedDataParallel(built.scoring) if world > 1 else built.scoring
    step(model, shares, world, packed)
    return {name: p.grad for name, p in built.scoring.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for family in sys.argv[3:]:
        torch.save(gradients(family, SHARES[rank], 2, packed=True), folder / f"{family}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
