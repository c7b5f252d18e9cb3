"""One configuration of the ledger benchmark as it travels to a process of its own, and what comes back.

Knows the two records, how such a process says that it is ready, and NVML's account of this process. No torch.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

NATIVE, TRANSFORMERS = "native", "transformers"
ROUNDED = "-rounded"


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A checkpoint ``folder`` and its settings. ``read_files``: read weights, make none on the device.

    ``rounded``: the parts that are no text layers are in 8 bits, and int4 has groups of 128. ``tight``: the
    requests share the smaller of the two KV pools that plans have.
    ``device`` is other than ``cuda`` only in tests of the programs themselves.
    """

    folder: str
    size: str
    weights: str
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    backend: str = NATIVE
    read_files: bool = False
    device: str = "cuda"
    rounded: bool = False
    tight: bool = False

    @property
    def name(self) -> str:
        """``2B-fp8-c4096-i1024-s2-p512``, for the table and for ``--only``."""
        pool = "-tight" if self.tight else ""
        chunk = f"-p{self.chunk}{pool}" if self.backend == NATIVE else "-transformers"
        weights = self.weights + (ROUNDED if self.rounded else "")
        return f"{self.size}-{weights}-c{self.context}-i{self.image_tokens}-s{self.sequences}{chunk}"


@dataclass(frozen=True, slots=True)
class Held:
    """What a process held on the device, in bytes.

    ``process``: by NVML, the card's used memory less what was used before this process came. ``own``: what
    NVML tells of this process alone, None where it does not. ``reserved`` and ``reserved_loaded``: torch's
    pool at the end and after loading; ``peak`` and ``loaded``: live tensors, at most and after loading.
    ``bare_context``: the process right after CUDA has started. ``workspace``: of that pool, for torch's own
    matrix products, 0 where none was computed. ``lines``: bytes of tensors by ledger line.
    ``reached``: what the worst case came to.
    """

    process: int
    own: int | None
    reserved: int
    reserved_loaded: int
    peak: int
    loaded: int
    bare_context: int
    workspace: int
    lines: dict[str, int]
    reached: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def begin() -> LedgerJob:
    """The job of this process, once it is told to go; until then it must leave the GPU alone."""
    job = LedgerJob(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody said go")
    return job


def end(held: Held) -> None:
    print(json.dumps(asdict(held)), flush=True)


class Meter:
    """NVML's account of the first GPU that this process may use. Made before CUDA starts."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible.startswith("GPU-"):
            self._device = pynvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            self._device = pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        self.before = self._used()

    def start_over(self) -> None:
        """What is in use now counts as before."""
        self.before = self._used()

    def process(self) -> int:
        """Bytes more in use on the card than before."""
        return self._used() - self.before

    def free(self) -> int:
        """Bytes of the card that nobody has."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).free)

    def own(self, pid: int | None = None) -> int | None:
        """What NVML lists for ``pid`` (None: this process); None where it lists none or does not tell."""
        pid = os.getpid() if pid is None else pid
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except self._nvml.NVMLError:
            return None
        found = [process.usedGpuMemory for process in listed if process.pid == pid]
        return int(found[0]) if found and found[0] is not None else None

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)
