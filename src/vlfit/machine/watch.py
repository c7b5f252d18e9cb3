"""GPUs looked at again and again, as ``vlfit top`` and a server's status page do.

Knows: that NVML is opened once and stays open; opening it anew for every look can take a second where no
other program keeps the driver awake. Does not know what the numbers mean (``gpu.py`` reads them).
"""

from types import TracebackType
from typing import Self

from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.machine.problems import Problem, Surroundings


class Watch:
    """A context manager. ``look`` may be called from one thread at a time; it never fails."""

    def __init__(self) -> None:
        host = read_host()
        self.wsl2 = host.wsl2
        self._around = Surroundings(host.wsl2, host.container)
        self._open = False

    def __enter__(self) -> Self:
        self._hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> tuple[tuple[Gpu, ...], tuple[Problem, ...]]:
        """GPUs as they are now, and what is wrong, as ``read_gpus`` has it."""
        self._hold()  # a driver that was broken at the last look may be there again
        return read_gpus(around=self._around)

    def close(self) -> None:
        """Let NVML go."""
        if self._open:
            import pynvml  # type: ignore[import-untyped]

            self._open = False
            pynvml.nvmlShutdown()

    def _hold(self) -> None:
        """NVML counts who has opened it: while we are one of them, ``read_gpus`` opens it for nothing."""
        if self._open:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # the bindings or the driver are not there: `read_gpus` says so in words
            return
        self._open = True
