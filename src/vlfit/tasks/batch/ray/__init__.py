"""Batches on a Ray cluster: its options. Imports neither Ray nor anything slow."""

import re
from dataclasses import dataclass

from vlfit.errors import UsageError

AUTO = "auto"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Which Ray cluster to use, and how many workers, each of which loads the model.

    ``address``: ``host:6379`` of a cluster's head; ``auto``: the cluster in RAY_ADDRESS, or else the one that
    this machine belongs to; ``local``: start one on this machine for the duration of the batch. ``workers``:
    None: one per ``gpus_per_worker`` GPUs, or one per machine in a cluster without GPUs. ``gpus_per_worker``:
    GPUs that one model is spread over; ignored on CPUs.

    Raises ``UsageError`` for an invalid address, or numbers below 1.
    """

    address: str = AUTO
    workers: int | None = None
    gpus_per_worker: int = 1

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise UsageError(
                "ray:// is a Ray Client server, but a batch has to run on a machine of the cluster",
                "Use --ray auto there, or from here: ray job submit -- vlfit batch ... --ray auto.",
            )
        if self.address not in (AUTO, LOCAL) and not _ADDRESS.fullmatch(self.address):
            raise UsageError(
                f"{self.address!r} is not an address of a Ray cluster",
                "Use auto, local, or the address that `ray start --head` printed, such as 192.168.1.10:6379.",
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}", "Use 1 or more.")
        if self.gpus_per_worker < 1:
            raise UsageError(f"{self.gpus_per_worker} GPUs per worker", "Use 1 or more.")

    def endpoint(self) -> tuple[str, int] | None:
        """Host and port in ``address``; None for ``auto`` and ``local``."""
        match = _ADDRESS.fullmatch(self.address)
        return (match[1].strip("[]"), int(match[2])) if match else None


_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
