"""One rank of `test_two_ranks_have_the_gradient_of_one`: the same datums on any number of ranks.

torchrun --nproc-per-node=2 rank_worker.py OUT PACKED
"""

import os
import sys

import torch

from conf.schema import Precision
from datum import collate_datums
from datum.packing import make_filler, plan_microbatches
from recipes.losses.cross_entropy import CrossEntropy
from recipes.training.ranks import prepare_model, rank_and_world, start_accelerator, wait_for_ranks
from recipes.training.step import train_step
from tests.recipes.training.test_step import MODEL, Keep, Surrogate, make

torch.set_num_threads(1)
LENGTHS = [2, 9, 1, 1, 7, 3, 1]


def main() -> None:
    out, packed = sys.argv[1], bool(int(sys.argv[2]))
    accelerator = start_accelerator(Precision.fp32)
    rank, world_size = rank_and_world()
    model = prepare_model(MODEL, accelerator)
    generator = torch.Generator().manual_seed(5)
    raw = []
    for i, n in enumerate(LENGTHS):
        ids = torch.randint(0, 23, (2, n), generator=generator).tolist()
        raw.append((ids[0], ids[1], [0.0 if i in (2, 3) else 0.5 * (1 + j % 3) for j in range(n)], 0.3 * i - 1))
    datums = make(raw)
    plan = plan_microbatches(
        LENGTHS, world_size=world_size, **({"max_tokens": 10} if packed else {"microbatch_size": 1})
    )
    keys = datums[0].loss_fn_inputs
    microbatches = [
        collate_datums([datums[i] for i in group], packed=packed) if group else make_filler(keys, packed=packed)
        for group in plan[rank]
    ]
    results = {}
    for name, loss in {
        "cross_entropy": CrossEntropy(),
        "sequence": CrossEntropy("sequence"),
        "constant": CrossEntropy("constant", 7),
        "surrogate": Surrogate(),
    }.items():
        optimizer = Keep(model.parameters())
        steps = [train_step(model, microbatches, loss, optimizer, accelerator=accelerator) for _ in range(2)]
        names = dict(MODEL.named_parameters())
        results[name] = {
            "steps": [(step.loss, step.grad_norm, step.tokens) for step in steps],
            "gradients": {key: optimizer.seen[p] for key, p in names.items()},
        }
    if rank == 0:
        torch.save(results, out)
    wait_for_ranks()
    os._exit(0)


if __name__ == "__main__":
    main()
