"""The process that compiles an engine's kernels ahead: ``python -m vlfit.engine.execution.precompile``.

Reads a ``BuildRequest`` from stdin, finds its launches by a dry run, compiles them meanwhile in child
processes into Triton's cache, and says on stdout how many are done. Started by ``loading/kernel_build.py``.
Ends when stdin is closed, so that no compiler outlives whoever wanted it.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Self

from vlfit.checkpoint.remote_headers import read_remote_checkpoint
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint, resolve_name
from vlfit.errors import VlfitError
from vlfit.kernels.launches import Launch, build_launcher, compile_for, compile_launch, import_kernels
from vlfit.loading.kernel_build import BuildRequest
from vlfit.loading.preload import leave_out_compiler

LOW_PRIORITY = 19


def checkpoint_of(model: str) -> Checkpoint:
    """Config and headers of ``model``: here, in the catalog, or read from the hub without its weights.

    Raises ``CheckpointError`` and ``HubError``.
    """
    [found] = resolve_name(model)[:1]
    if found.local_folder() is not None:
        return open_checkpoint(model)
    entry = found.entry
    if entry is not None:
        return Checkpoint(found.name, mini_folder(), entry.config, entry.tensors)
    return read_remote_checkpoint(found.name)


def find_launches(request: BuildRequest, checkpoint: Checkpoint, found: Callable[[Launch], None]) -> None:
    """Tell ``found`` each launch of ``request``, whose model is ``checkpoint``, as soon as it is known.

    Raises what the engine raises. Changes global state of the kernels: for a process of its own.
    """
    from vlfit.engine.execution.dry_run import engine_launches
    from vlfit.kernels.target import TargetCard

    card = TargetCard(*request.card)
    engine_launches(checkpoint, request.engine_options, card, request.dequant, found)


class Compilers:
    """Child processes that compile launches for ``capability``, ``processes`` at once, as they are added.

    The children are forked by the constructor, so nothing may have used CUDA. All kernels are imported
    before, lest each child does so. Use it in a ``with`` block, which waits for what was added.
    """

    def __init__(self, capability: tuple[int, int], processes: int) -> None:
        import_kernels()
        self._capability = capability
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), follow_parent, (os.getpid(),))
        self._pool.submit(int).result()  # forks all of them
        self._added: list[Future[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, launch: Launch) -> None:
        """Compile ``launch`` as soon as a child is free."""
        self._added.append(self._pool.submit(_compile, launch, self._capability))

    def hashes(self, done: Callable[[int, int], None] = lambda count, added: None) -> list[str]:
        """Wait for all that were added; Triton's hash of each, in order.

        ``done``: told how many are done, of how many. Raises what Triton raises, or ``BrokenProcessPool`` if
        a compiler was killed.
        """
        for count, future in enumerate(as_completed(self._added), 1):
            future.result()
            done(count, len(self._added))
        return [future.result() for future in self._added]


def _compile(launch: Launch, capability: tuple[int, int]) -> str:
    with compile_for(capability):
        compiled = compile_launch(launch)
    build_launcher(compiled)
    return str(compiled.hash)


def follow_parent(parent: int) -> None:
    """End this child with its parent, however that ends."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: Iterable[str]) -> None:
    """Build what stdin asks for. ``arguments``: number of processes; 1 for the lowest priority, else 0."""
    processes, low = (int(each) for each in arguments)
    if low:
        os.nice(LOW_PRIORITY)
    request = BuildRequest.from_json(_read_line())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    checkpoint = checkpoint_of(request.model)
    marker = request.marker(checkpoint)
    if marker.exists():
        return
    import torch

    torch.set_num_threads(1)
    leave_out_compiler()

    def say(done: int, found: int) -> None:
        print(json.dumps({"done": done, "kernels": found}), flush=True)

    with Compilers(request.card[0], processes) as compilers:
        find_launches(request, checkpoint, compilers.add)
        hashes = compilers.hashes(say)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"{len(hashes)} kernels\n", "ascii")


# By its number: a forked child closes ``sys.stdin``, whose lock a thread that reads it holds for ever.
_STDIN = 0


def _read_line() -> str:
    line = b""
    while not line.endswith(b"\n") and (part := os.read(_STDIN, 65536)):
        line += part
    return line.decode()


def _end_with_stdin() -> None:
    while os.read(_STDIN, 65536):
        pass
    os._exit(1)  # children follow


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except VlfitError as error:
        sys.exit(" ".join(error.message.splitlines()))
