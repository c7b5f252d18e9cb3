"""Kernels compiled ahead, by a process of its own and its children, while weights are fetched or read.

A first start on a card compiles some forty kernels, a second each on one core. Which ones follows from
checkpoint, options and card alone (``engine/execution/dry_run.py``), and compiling needs no GPU. They are
left in Triton's own cache on disk, where the engine's launches find them. Imports no torch.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import LoadProgress
from vlfit.checkpoint.source import Checkpoint
from vlfit.loading.preload import gpus_at_start, has_cuda_build
from vlfit.machine.cards import KERNEL_CAPABILITY
from vlfit.machine.host import read_host, usable_cores
from vlfit.machine.model import Gpu
from vlfit.plan.gpus import runs_kernels
from vlfit.plan.native.lines import dequant_config_on
from vlfit.plan.native.tiles import DequantConfig
from vlfit.units import MIB

logger = logging.getLogger(__name__)

MODULE = "vlfit.engine.execution.precompile"
PHASE = "compiling kernels"
_PROCESS_BYTES = 512 * MIB  # of RAM that one compiler may take
_MAX_PROCESSES = 16
_LONGEST_LINE = 10_000  # characters that the child may say at a time
_STOP_SECONDS = 5.0
# Options that no kernel depends on.
_WITHOUT_KERNELS = (
    "device", "kv_tokens", "even_chunks", "max_tokens", "image_cache_bytes", "state_snapshot_bytes",
    "device_snapshots", "enforce_plan", "idle_sleep", "offload", "prefix_cache",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Whose kernels to compile, and for which card.

    ``model``: a name or a path. ``options``: of the engine, those that kernels depend on. ``card``: compute
    capability (major, minor), name and multiprocessors. ``dequant``: as the plan chooses it for the card.
    """

    model: str
    options: dict[str, Any]
    card: tuple[tuple[int, int], str, int]
    dequant: DequantConfig

    def marker(self, checkpoint: Checkpoint) -> Path:
        """A file that is there once the kernels of the request, whose model is ``checkpoint``, are compiled.

        It is in Triton's cache, so that it goes with the kernels when that is emptied. Its name is a hash of
        all that kernels depend on, so checkpoints of the same shapes share it.
        """
        shapes = sorted((info.name, info.dtype, info.shape) for info in checkpoint.tensors.values())
        versions = [_version(name) for name in ("vlfit", "torch", "triton")]
        request = {name: value for name, value in asdict(self).items() if name != "model"}
        facts = [asdict(checkpoint.config), shapes, request, versions, sys.version_info[:2]]
        text = json.dumps(facts, sort_keys=True, default=lambda each: sorted(map(str, each)))
        return triton_cache() / f"vlfit-{hashlib.sha256(text.encode()).hexdigest()}"

    def to_json(self) -> str:
        """The request as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BuildRequest":
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        (major, minor), name, multiprocessors = fields["card"]
        dequant = DequantConfig(**fields["dequant"])
        return cls(fields["model"], fields["options"], ((major, minor), name, multiprocessors), dequant)

    @property
    def engine_options(self) -> EngineOptions:
        """The options of the engine."""
        return EngineOptions(**self.options)


def triton_cache() -> Path:
    """The folder of Triton's cache, as Triton finds it."""
    folder = os.environ.get("TRITON_CACHE_DIR", "").strip()
    if folder:
        return Path(folder)
    home = os.environ.get("TRITON_HOME", "").strip()
    return (Path(home) if home else Path.home()) / ".triton" / "cache"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def start_build(model: str | Path, checkpoint: Checkpoint, options: EngineOptions) -> "KernelBuild | None":
    """Start to compile the kernels of an engine that is about to be built; None if nothing is to be done.

    ``model``: where ``checkpoint`` is. None without ``enforce_plan``, without a GPU, and if its kernels were
    compiled before, nor with a torch for CPUs or with ``kernels`` that are plain.
    """
    if options.device == "cpu" or not options.enforce_plan or not has_cuda_build():
        return None
    if options.kernels != "auto":
        return None
    gpus = gpus_at_start()
    _, _, number = options.device.partition(":")
    index = int(number) if number.isdecimal() else 0
    request = build_request(model, options, gpus[index]) if index < len(gpus) else None
    if request is None or request.marker(checkpoint).exists():
        return None
    try:
        return KernelBuild(request)
    except OSError as error:
        logger.info("kernels are compiled one by one: %s", error)
        return None


def start_build_for_pull(model: str) -> "KernelBuild | None":
    """Start to compile in the background what `vlfit serve` would launch for ``model`` on the first GPU that
    its kernels run on.

    With the defaults of its options. None without a GPU, or if nothing is compiled for it here.
    """
    gpus = gpus_at_start() if has_cuda_build() else ()
    gpu = next(filter(runs_kernels, gpus), None)
    request = None if gpu is None else build_request(model, EngineOptions(), gpu)
    try:
        return None if request is None else KernelBuild(request, low_priority=True)
    except OSError:
        return None


def build_request(model: str | Path, options: EngineOptions, gpu: Gpu) -> BuildRequest | None:
    """The request for ``model`` with ``options`` on ``gpu``; None if no kernels are compiled for it here.

    None without Triton, under its interpreter, and for a card below ``KERNEL_CAPABILITY``.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
        return None
    if gpu.compute_capability < KERNEL_CAPABILITY:
        return None
    fields = {name: value for name, value in asdict(options).items() if name not in _WITHOUT_KERNELS}
    card = (gpu.compute_capability, gpu.name, gpu.multiprocessors or 0)
    return BuildRequest(str(model), fields, card, dequant_config_on(gpu))


def num_processes() -> int:
    """How many compilers may run at once: a core is left for others, and RAM for each."""
    room = read_host().ram_available // _PROCESS_BYTES
    return max(1, min(usable_cores() - 1, room, _MAX_PROCESSES))


class KernelBuild:
    """A running build of ``request``, started by the constructor.

    ``low_priority``: for work in the background. Its children end with it, and it ends with this process.
    ``kernels``: how many there are, and ``done`` of them; 0 until that is known. ``failure``: the last line
    that it said when it failed, else "".
    """

    def __init__(self, request: BuildRequest, *, low_priority: bool = False) -> None:
        self.request = request
        self.done = self.kernels = 0
        self.failure = ""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by ``stop``
        command = [sys.executable, "-m", MODULE, str(num_processes()), str(int(low_priority))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):  # it has ended already: ``wait`` says why
            # Not closed until it is to end: it watches for that.
            stdin.write(request.to_json() + "\n")
            stdin.flush()
        self._reader = threading.Thread(target=self._read, args=(stdout,), name="vlfit-kernels", daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        with suppress(ValueError, OSError):
            while line := lines.readline(_LONGEST_LINE):
                with suppress(ValueError, TypeError, KeyError):
                    said = json.loads(line)
                    self.done, self.kernels = int(said["done"]), int(said["kernels"])

    @property
    def pid(self) -> int:
        """The process that builds."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, progress: LoadProgress | None = None, seconds: float | None = None) -> bool:
        """Wait until it ends, ``seconds`` at most; returns whether all kernels are compiled.

        ``progress``: told ``PHASE`` and the share done. A failure is in ``failure``; after ``seconds`` it is
        left to go on.
        """
        waited, interval = 0.0, 0.1
        while self.running and (seconds is None or waited < seconds):
            if progress is not None:
                progress(PHASE, self.done / self.kernels if self.kernels else 0.0)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(interval)
            waited += interval
        if self.running:
            return False
        self._reader.join(_STOP_SECONDS)
        if self._process.returncode:
            self._errors.seek(0)
            said = self._errors.read()[-_LONGEST_LINE:].decode(errors="replace").strip().splitlines()
            self.failure = said[-1] if said else f"it ended with {self._process.returncode}"
        self.stop()
        return not self.failure

    def stop(self) -> None:
        """End it, if it has not ended, and its children."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS if self.running else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_STOP_SECONDS)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        self._errors.close()
