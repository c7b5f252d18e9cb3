"""What a person may say of the cluster that a batch runs on. Imports nothing that takes time."""

import re
from dataclasses import dataclass

from vlfit.errors import UsageError

AUTO = "auto"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """``address``: of a cluster's head, ``host:6379``; ``auto``: the cluster that this machine is part of, or
    the one that RAY_ADDRESS names; ``local``: one is started on this machine for as long as the batch runs.
    ``workers``: how many models run at once; None: one for each GPU, or one for each machine without.
    ``gpus_per_worker``: how many of them one model is spread over.

    Raises ``UsageError`` for what cannot be an address, or fewer than one.
    """

    address: str = AUTO
    workers: int | None = None
    gpus_per_worker: int = 1

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise UsageError(
                "ray:// leads to a Ray Client server, and a batch has to run on a machine of the cluster",
                "use --ray auto there, or from here: ray job submit -- vlfit batch ... --ray auto",
            )
        if self.address not in (AUTO, LOCAL) and not _ADDRESS.fullmatch(self.address):
            raise UsageError(
                f"{self.address!r} is no address of a Ray cluster",
                "use auto, local, or what `ray start --head` has printed, such as 192.168.1.10:6379",
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}", "use 1 or more")
        if self.gpus_per_worker < 1:
            raise UsageError(f"{self.gpus_per_worker} GPUs for each worker", "use 1 or more")

    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the head, if an address was given."""
        match = _ADDRESS.fullmatch(self.address)
        return (match[1].strip("[]"), int(match[2])) if match else None


_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
