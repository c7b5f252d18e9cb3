"""A process that holds so much of a GPU's memory that a stated number of bytes is free, as on a small card.

    python -m benchmarks.hold      reads a number of bytes a line, answers with what is free then

Knows torch's allocator: 2 MiB are the least that it takes from the driver. Does not know what the
rest is for. The driver's own word for "free" counts (NVML, as in nvidia-smi), and only what is asked for
before another program starts is what that program finds.
"""

import json
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB, ROOT

if TYPE_CHECKING:
    from torch import Tensor

STEP = 2 * MIB  # the driver gives memory in such pieces, and torch asks for two of half of it
NEAR = MIB  # how near to what was asked for is near enough
_ROOM = 16 * MIB  # what is taken piece by piece in the end


class Hold:
    """Holds memory for as long as the ``with`` block lasts. ``context`` bytes are its own CUDA context's."""

    context = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hold"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.context = int(self._answer()["context"])
        return self

    def leave(self, wanted: int) -> int:
        """Take or give back so that ``wanted`` bytes are free; those that are. Raises ``RuntimeError``."""
        if self._process.stdin is None:
            raise RuntimeError("the holding process has no input")
        self._process.stdin.write(f"{wanted}\n")
        self._process.stdin.flush()
        free = int(self._answer()["free"])
        if abs(free - wanted) > NEAR:
            raise RuntimeError(f"{wanted / MIB:.1f} MiB were to be free, {free / MIB:.1f} MiB are")
        return free

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("the process that holds GPU memory has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    import torch

    meter = Meter()
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    print(json.dumps({"context": meter.process() - torch.cuda.memory_reserved()}), flush=True)
    held: list[Tensor] = []
    for line in sys.stdin:
        held.clear()
        torch.cuda.empty_cache()
        take(meter, int(line), held)
        print(json.dumps({"free": meter.free()}), flush=True)


def take(meter: Meter, wanted: int, held: "list[Tensor]") -> None:
    """Fill ``held`` until ``wanted`` bytes are free: most in one piece, the rest step by step."""
    import torch

    much = meter.free() - wanted - _ROOM
    if much > _ROOM:
        held.append(torch.empty(much - much % STEP, dtype=torch.uint8, device="cuda"))
    while meter.free() - wanted > NEAR:
        before = meter.free()
        held += [torch.empty(STEP // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        if meter.free() >= before:
            return  # what was taken was there already: the caller sees that it is not near


if __name__ == "__main__":
    main()
