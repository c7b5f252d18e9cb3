"""Seconds that an engine takes to sleep and to wake on this GPU, and the memory it frees meanwhile.

    python -m benchmarks.sleep 4B-fp8 8B-int4 --rounds 3 --json FILE      a minute for each
    python -m benchmarks.sleep --ways                  also other ways to copy as many bytes to RAM and back

Checkpoints are sparse (``checkpoints.py``). GPU memory is NVML's. Waking ends with the first token of a
request about a picture and is timed from its sending. Needs a GPU.
"""

import argparse
import gc
import mmap
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import write_picture, write_sparse_checkpoint
from benchmarks.gpu_memory import GpuMeter
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    card,
    commit,
    cpu_name,
    print_table,
    require_gpu,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from vlfit.api.engine_options import SleepLevel
    from vlfit.backends.native import NativeBackend

TOKENS = 16
CHUNK = 64 * MIB  # touched by one thread
THREADS = 8


@dataclass
class SleepCycle:
    """Once asleep and awake again: seconds, and bytes on the GPU before, asleep and after the request."""

    checkpoint: str
    park: str
    weights: int
    kv_cache: int
    before: int
    asleep: int
    after: int
    sleep_s: float
    wake_s: float
    first_token_s: float
    same_words: bool

    @property
    def share(self) -> float:
        """Bytes freed, over those of weights and KV cache."""
        return (self.before - self.asleep) / (self.weights + self.kv_cache)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", default=["4B-fp8"], metavar="SIZE-FORMAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--ways", action="store_true", help="also time other ways to copy as many bytes")
    add_json_option(parser)
    options = parser.parse_args()
    require_gpu("sleep")
    meter = GpuMeter()
    print(f"commit {commit()}; {card()}; {cpu_name()}; {sys.version.split()[0]}")
    cycles: list[SleepCycle] = []
    copies: list[CopyTimes] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.checkpoints:
            checkpoint = write_sparse_checkpoint(Path(folder) / name, *name.split("-"))
            measured, sizes = measure_sleep(name, checkpoint, options, meter)
            cycles += measured
            print_cycles(measured)
            if options.ways:
                timed = list(time_copies(sizes))
                copies += timed
                print_copies(timed)
    facts = {"commit": commit(), "card": card(), "processor": cpu_name()}
    results = {"naps": [asdict(each) for each in cycles], "ways": [asdict(each) for each in copies]}
    write_json(options.json, {**facts, **results})


# --- the engine --------------------------------------------------------------------------------------------


def measure_sleep(
    name: str, checkpoint: Path, options: argparse.Namespace, meter: GpuMeter
) -> tuple[list[SleepCycle], list[int]]:
    """``options.rounds`` cycles of each sleep level, and the sizes of the offloaded storages."""
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.native import NativeBackend

    engine_options = EngineOptions(
        device="cuda", max_model_len=options.context, max_num_seqs=options.sequences, enforce_plan=True
    )
    content = write_picture("640x480").read_bytes()
    with NativeBackend.load(checkpoint, engine_options) as backend:
        _, text = time_request(backend, content)
        sizes = [storage.nbytes() for storage in backend._engine_thread.engine.sleeper._storages()[0]]
        levels: tuple[SleepLevel, ...] = ("ram", "files")
        cycles = [
            measure_cycle(name, backend, content, text, level, meter)
            for level in levels
            for _ in range(options.rounds)
        ]
    return cycles, sizes


def measure_cycle(
    name: str, backend: "NativeBackend", picture: bytes, text: str, level: "SleepLevel", meter: GpuMeter
) -> SleepCycle:
    memory = backend.account().memory
    before = meter.growth()
    began = time.perf_counter()
    backend.sleep(level).result()
    asleep_at = time.perf_counter()
    asleep = meter.growth()
    first, answer = time_request(backend, picture)
    # Once more, woken without a request: the waking alone.
    after = meter.growth()
    backend.sleep(level).result()
    woken = backend.wake().result().seconds
    return SleepCycle(
        checkpoint=name,
        park=level,
        weights=sum(memory.weights.values()),
        kv_cache=memory.kv_cache,
        before=before,
        asleep=asleep,
        after=after,
        sleep_s=asleep_at - began,
        wake_s=woken,
        first_token_s=first,
        same_words=answer == text,
    )


def time_request(backend: "NativeBackend", picture: bytes) -> tuple[float, str]:
    """Seconds to the first token of a request about ``picture``, and its answer."""
    from vlfit.api.conversation import ImagePart, single_turn
    from vlfit.api.outputs import Chunk
    from vlfit.api.sampling_params import SamplingParams

    arrivals: queue.SimpleQueue[tuple[float, Chunk | Exception]] = queue.SimpleQueue()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    began = time.perf_counter()
    prepared = backend.prepare(single_turn("What is this?", ImagePart(picture)), sampling)
    backend.start(prepared, sampling, lambda chunk: arrivals.put((time.perf_counter(), chunk)))
    first, text = None, ""
    while True:
        at, chunk = arrivals.get()
        if isinstance(chunk, Exception):
            raise chunk
        first = first or at
        text += chunk.text
        if chunk.finish_reason is not None:
            return first - began, text


def print_cycles(cycles: Sequence[SleepCycle]) -> None:
    heading = [
        "checkpoint", "level", "weights + KV MiB", "freed", "left MiB", "asleep s", "wake s",
        "to first token s", "growth MiB", "same answer",
    ]  # fmt: skip
    rows = [
        [
            each.checkpoint,
            each.park,
            f"{(each.weights + each.kv_cache) / MIB:,.0f}",
            f"{each.share:.1%}",
            f"{each.asleep / MIB:,.0f}",
            f"{each.sleep_s:.2f}",
            f"{each.wake_s:.2f}",
            f"{each.first_token_s:.2f}",
            f"{(each.after - each.before) / MIB:,.0f}",
            "yes" if each.same_words else "NO",
        ]
        for each in cycles
    ]
    print_table([heading, *rows])


# --- other ways to copy ------------------------------------------------------------------------------------


@dataclass
class CopyTimes:
    """Seconds of one way to copy ``bytes`` to RAM and back, allocating and freeing the RAM included."""

    name: str
    bytes: int
    store_s: float
    fetch_s: float
    free_s: float


def time_copies(sizes: Sequence[int]) -> Iterator[CopyTimes]:
    """Time each way with storages of ``sizes``, among them the engine's (``engine/memory/sleep.py``)."""
    import torch

    from vlfit.engine.memory import sleep

    gc.collect()  # the engine that was here before; then undo its memory limit
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    for stages in (1, 2, 4, 8):
        sleep.STAGES = stages
        yield _time_copy(f"{stages} stages of pinned RAM and threads", sizes, _staged)
    sleep.STAGES = 4
    for mib in (4, 64):
        default, sleep.STAGE_BYTES = sleep.STAGE_BYTES, mib * MIB
        yield _time_copy(f"4 stages of {mib} MiB", sizes, _staged)
        sleep.STAGE_BYTES = default
    yield _time_copy("pageable RAM, copied by torch", sizes, lambda all: _OneBuffer(all, _pageable))
    yield _time_copy("RAM pinned by torch", sizes, lambda all: _OneBuffer(all, _pinned))
    yield _time_copy("RAM touched by threads, then pinned", sizes, lambda all: _OneBuffer(all, _touched))
    torch.cuda.empty_cache()


def _time_copy(
    name: str, sizes: Sequence[int], offload: "Callable[[list[UntypedStorage]], Any]"
) -> CopyTimes:
    import torch

    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 251 + 1)
    storages = [tensor.untyped_storage() for tensor in tensors]
    torch.cuda.synchronize()
    began = time.perf_counter()
    offloaded = offload(storages)
    torch.cuda.empty_cache()
    stored_at = time.perf_counter()
    offloaded.restore()
    torch.cuda.synchronize()
    restored_at = time.perf_counter()
    del offloaded
    freed_at = time.perf_counter()
    for number, tensor in enumerate(tensors):
        if not bool((tensor == number % 251 + 1).all()):
            raise ValueError(f"{name} lost bytes")
    del tensors, tensor, storages
    torch.cuda.empty_cache()
    return CopyTimes(name, sum(sizes), stored_at - began, restored_at - stored_at, freed_at - restored_at)


def _staged(storages: "list[UntypedStorage]") -> Any:
    import torch

    from vlfit.engine.memory.sleep import OffloadedStorages

    return OffloadedStorages(storages, torch.device("cuda"))


class _OneBuffer:
    """All storages copied into one buffer in RAM, which ``allocate`` returns with what keeps it alive."""

    def __init__(
        self, storages: "list[UntypedStorage]", allocate: "Callable[[int], tuple[Tensor, Any]]"
    ) -> None:
        import torch

        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self._tensors = [
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (size,), (1,))
            for storage, size in self._sizes
        ]
        self._buffer, self._owner = allocate(sum(size for _, size in self._sizes))
        for tensor, part in self._pairs():
            part.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._sizes:
            storage.resize_(size)
        for tensor, part in self._pairs():
            tensor.copy_(part, non_blocking=True)

    def _pairs(self) -> "Iterator[tuple[Tensor, Tensor]]":
        start = 0
        for tensor, (_, size) in zip(self._tensors, self._sizes, strict=True):
            yield tensor, self._buffer[start : start + size]
            start += size


def _pageable(size: int) -> "tuple[Tensor, Any]":
    import torch

    return torch.empty(size, dtype=torch.uint8), None


def _pinned(size: int) -> "tuple[Tensor, Any]":
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True), None


def _touched(size: int) -> "tuple[Tensor, Any]":
    import numpy as np
    import torch

    from vlfit.loading import pinned

    def touch(start: int) -> None:
        view[start : start + CHUNK] = 0

    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raise OSError("needs Linux")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(pages, dtype=np.uint8)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(touch, range(0, size, CHUNK)))
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    pinned._lock(buffer.data_ptr(), size, torch.device("cuda"))
    return buffer, _PinnedPages(buffer.data_ptr(), pages)


class _PinnedPages:
    """Unpins pages when it is deleted."""

    def __init__(self, address: int, pages: mmap.mmap) -> None:
        self._address, self._pages = address, pages

    def __del__(self) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(self._address)


def print_copies(copies: Sequence[CopyTimes]) -> None:
    heading = ["way", "MiB", "to RAM s", "GB/s", "back s", "GB/s", "RAM freed s"]
    rows = [
        [
            each.name,
            f"{each.bytes / MIB:,.0f}",
            f"{each.store_s:.2f}",
            f"{each.bytes / each.store_s / 1e9:.1f}",
            f"{each.fetch_s:.2f}",
            f"{each.bytes / each.fetch_s / 1e9:.1f}",
            f"{each.free_s:.2f}",
        ]
        for each in copies
    ]
    print_table([heading, *rows])


if __name__ == "__main__":
    main()
