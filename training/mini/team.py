"""Data-parallel training with a process for each device (`torchrun`); one process alone is a team of one."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Team:
    """``rank``: this process, from 0; ``size``: how many there are."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def join(kind: str) -> "Team":
        """The team of this process, by torchrun's environment. ``kind``: ``cuda`` or ``cpu``."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return Team()
        rank = int(os.environ["RANK"])
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        return Team(rank, size)

    @property
    def is_leader(self) -> bool:
        """Whether this process prints, measures and writes."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the process group without waiting for the others."""
        if self.size > 1:
            distributed.destroy_process_group()

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Put the mean of all processes' gradients into ``grad`` of each parameter."""
        if self.size == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        # One message: a small model has hundreds of matrices.
        together = torch.cat([gradient.view(-1) for gradient in gradients])
        distributed.all_reduce(together)
        together /= self.size
        parts = together.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(parts))

    def agree(self, number: float, processor: torch.device) -> float:
        """The leader's ``number``, for all."""
        if self.size == 1:
            return number
        told = torch.tensor(number, dtype=torch.float64, device=processor)
        distributed.broadcast(told, 0)
        return float(told)
