"""Several GPUs of one machine, one process each: the same weights, other pictures, averaged gradients.

`torchrun --nproc-per-node N -m toprovar.tools.train_demo.train ...` starts them; a plain call is the only worker.
Worker 0 keeps the clock, saves, and judges; the others only train.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

WAIT = timedelta(hours=1)  # worker 0 judges and saves while the others wait


@dataclass(frozen=True)
class Workers:
    """rank: this process's number from 0; count: how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replaces every gradient by its mean over the workers, in one transfer."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.SUM)
        parts = (flat / self.count).split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def from_first(self, *values: float) -> tuple[float, ...]:
        """Worker 0's values, for decisions that all must take alike (they differ by clock). Does not touch the GPU."""
        if self.count == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64)
        torch.distributed.broadcast(shared, 0, group=_control_group())
        return tuple(shared.tolist())

    def wait(self) -> None:
        """Returns when every worker has come here."""
        self.from_first(0.0)
        if self.count > 1:
            torch.distributed.barrier(group=_control_group())


ALONE = Workers()
_group: torch.distributed.ProcessGroup | None = None


def _control_group() -> torch.distributed.ProcessGroup:
    assert _group is not None
    return _group


def start_workers(device: str) -> Workers:
    """This process among those that torchrun started, or the only one."""
    global _group
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT)
    _group = torch.distributed.new_group(backend="gloo", timeout=WAIT)
    return Workers(int(os.environ["RANK"]), count)


def stop_workers(workers: Workers) -> None:
    if workers.count > 1:
        torch.distributed.destroy_process_group()


def local_device(device: str) -> torch.device:
    """cuda becomes this worker's GPU."""
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
        return chosen
    return torch.device(device)
