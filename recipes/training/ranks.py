"""Processes: how many there are, sums over them, per-step random seeds, and a clean end.

Accelerate owns the device, the precision and the process group; nothing here starts a process. One rank is the ordinary
case, and every function below is then the identity.
"""

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from conf.closed import ConfigError
from conf.schema import Precision

_OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def start_accelerator(precision: Precision, num_processes: int | None = None) -> Accelerator:
    """Join the ranks that the launcher started.

    Args:
        precision: Compute precision (autocast); parameters keep their dtype.
        num_processes: Ranks the run must have; None accepts what the launcher started.

    Raises:
        ConfigError: The launcher started another number of ranks than asked for or than Accelerate sees, or set up an
            engine that this package does not drive.
    """
    for variable, engine in _OTHER_ENGINES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise ConfigError(
                f"the launcher asked Accelerate for {engine}: start plain data-parallel ranks (torchrun, or accelerate "
                "launch --multi_gpu)"
            )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes is not None and num_processes != started:
        raise ConfigError(
            f"launch.num_processes={num_processes}, but the launcher started {started}: use torchrun --nproc-per-node "
            f"{num_processes} -m recipes.<name> (accelerate launch --cpu starts one process, whatever its "
            "--num_processes)"
        )
    accelerator = Accelerator(
        # Without cpu=True, ranks started on a machine without a GPU each take themselves for the only one.
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == Precision.bf16 else "no",
    )
    if accelerator.num_processes != started:
        raise ConfigError(f"the launcher started {started} processes, but Accelerate sees {accelerator.num_processes}")
    return accelerator


def prepare_model(model: nn.Module, accelerator: Accelerator, *, unused_parameters: bool = False) -> nn.Module:
    """Move a model to its device and wrap it for gradient exchange and precision.

    Nothing else is handed to Accelerate: a prepared scheduler would step once a rank, a prepared loader would own the
    order of the data.

    Args:
        model: The scoring model.
        accelerator: Of this process.
        unused_parameters: A microbatch may leave parameters without gradient (experts of a mixture-of-experts model).
    """
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=unused_parameters)
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def rank_and_world() -> tuple[int, int]:
    """This rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor elementwise over all ranks, in its dtype; the argument is not changed."""
    if rank_and_world()[1] == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def largest_over_ranks(value: int, device: torch.device) -> int:
    """The largest of one integer a rank; every rank must call it."""
    if rank_and_world()[1] == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_over_ranks(item: Any, group: Any = None) -> list[Any]:
    """One picklable object of every rank, in the order of ranks; every rank must call it.

    Args:
        item: This rank's.
        group: Process group; None: the default one. Threads that gather at one time need one each.
    """
    _, world_size = rank_and_world()
    if world_size == 1:
        return [item]
    items: list[Any] = [None] * world_size
    dist.all_gather_object(items, item, group=group)
    return items


def wait_for_ranks() -> None:
    """Return once every rank has called this."""
    if rank_and_world()[1] > 1:
        dist.barrier()


def seed_step(seed: int, step: int) -> None:
    """Seed torch's generators for one step on this rank, from (seed, step, rank) alone.

    Dropout in step k is thereby the same whether or not the run was interrupted before it, and a checkpoint holds no
    generator state.
    """
    rank, _ = rank_and_world()
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
