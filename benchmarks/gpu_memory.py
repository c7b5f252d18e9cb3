"""GPU memory as the driver counts it (NVML), and a way to make a large card small.

    python -m benchmarks.gpu_memory      reads a number of bytes a line, answers with what is free then

``MemoryHolder`` starts this as a process that occupies memory until a given number of bytes is free. Only
what is free before another program starts is what that program finds.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from benchmarks.harness import MIB, ROOT

if TYPE_CHECKING:
    from torch import Tensor

STEP = 2 * MIB  # the driver's allocation granularity; torch serves two tensors of half of it from one
TOLERANCE = MIB  # between bytes asked for and bytes free
_STEPWISE = 16 * MIB  # taken step by step at the end


class GpuMeter:
    """NVML's account of the first visible GPU. Create it before CUDA starts in this process."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible.startswith("GPU-"):
            self._device = pynvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            self._device = pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        self.baseline = self._used()

    def reset(self) -> None:
        """Count from what is in use now."""
        self.baseline = self._used()

    def growth(self) -> int:
        """Bytes in use on the GPU beyond the baseline."""
        return self._used() - self.baseline

    def free(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).free)

    def of_process(self, pid: int | None = None) -> int | None:
        """Bytes that NVML lists for ``pid`` (default: this process); None if it does not list it."""
        pid = os.getpid() if pid is None else pid
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except self._nvml.NVMLError:
            return None
        sizes = [process.usedGpuMemory for process in listed if process.pid == pid]
        return int(sizes[0]) if sizes and sizes[0] is not None else None

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)


class MemoryHolder:
    """A process that occupies GPU memory in the ``with`` block. ``context``: bytes of its CUDA context."""

    context = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_memory"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.context = int(self._read()["context"])
        return self

    def leave_free(self, size: int) -> int:
        """Occupy all but ``size`` bytes; what is free then. Raises ``RuntimeError`` if it is not that."""
        if self._process.stdin is None:
            raise RuntimeError("the process that holds GPU memory has no input")
        self._process.stdin.write(f"{size}\n")
        self._process.stdin.flush()
        free = int(self._read()["free"])
        if abs(free - size) > TOLERANCE:
            raise RuntimeError(f"{free / MIB:.1f} MiB of GPU memory are free, not {size / MIB:.1f} MiB")
        return free

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("the process that holds GPU memory has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def memory_holder(options: argparse.Namespace) -> Iterator[MemoryHolder | None]:
    """A ``MemoryHolder``; None on a CPU (``options.device``)."""
    if options.device == "cpu":
        yield None
    else:
        with MemoryHolder() as holder:
            yield holder


def main() -> None:
    import torch

    meter = GpuMeter()
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    print(json.dumps({"context": meter.growth() - torch.cuda.memory_reserved()}), flush=True)
    tensors: list[Tensor] = []
    for line in sys.stdin:
        tensors.clear()
        torch.cuda.empty_cache()
        occupy(meter, int(line), tensors)
        print(json.dumps({"free": meter.free()}), flush=True)


def occupy(meter: GpuMeter, size: int, tensors: "list[Tensor]") -> None:
    """Append to ``tensors`` until ``size`` bytes are free: most in one allocation, the rest step by step."""
    import torch

    bulk = meter.free() - size - _STEPWISE
    if bulk > _STEPWISE:
        tensors.append(torch.empty(bulk - bulk % STEP, dtype=torch.uint8, device="cuda"))
    while meter.free() - size > TOLERANCE:
        before = meter.free()
        tensors += [torch.empty(STEP // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        if meter.free() >= before:
            return  # torch had it reserved already: the caller compares the result


if __name__ == "__main__":
    main()
