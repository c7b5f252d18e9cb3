"""The process that compiles an engine's kernels ahead: ``python -m vlfit.engine.execution.precompile``.

Reads a ``BuildRequest`` from stdin, finds its launches by a dry run, compiles them in child processes into
Triton's cache, and says on stdout how many are done. Started by ``loading/kernel_build.py``. Ends when stdin
is closed, so that no compiler outlives whoever wanted it.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from vlfit.checkpoint.remote_headers import read_remote_checkpoint
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint, resolve_name
from vlfit.errors import VlfitError
from vlfit.kernels.launches import Launch, compile_for, compile_launch
from vlfit.loading.kernel_build import BuildRequest

LOW_PRIORITY = 19
# Kernels that take longest to compile begin first, so that none is waited for alone at the end.
_SLOWEST = ("paged_decode", "sample_tokens", "gated_delta", "paged_prefill", "matmul", "attention")


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


def request_launches(request: BuildRequest, checkpoint: Checkpoint) -> list[Launch]:
    """The launches of ``request``, whose model is ``checkpoint``, the slowest to compile first.

    Raises what the engine raises. Changes global state of the kernels: for a process of its own.
    """
    from vlfit.engine.execution.dry_run import engine_launches
    from vlfit.kernels.target import TargetCard

    launches = engine_launches(checkpoint, request.engine_options, TargetCard(*request.card), request.dequant)
    return sorted(launches, key=_slowness)


def _slowness(launch: Launch) -> int:
    return next((place for place, name in enumerate(_SLOWEST) if name in launch.name), len(_SLOWEST))


def compile_launches(
    launches: Sequence[Launch],
    capability: tuple[int, int],
    processes: int,
    done: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Compile ``launches`` for ``capability`` in ``processes`` children; returns Triton's hash of each.

    ``done``: told how many are done. The children are forked, so nothing may have used CUDA. Raises what
    Triton raises, or ``BrokenProcessPool`` if a compiler was killed.
    """
    with ProcessPoolExecutor(processes, get_context("fork"), _follow_parent, (os.getpid(),)) as pool:
        waiting = {pool.submit(_compile, launch, capability): place for place, launch in enumerate(launches)}
        hashes = [""] * len(launches)
        for count, future in enumerate(as_completed(waiting), 1):
            hashes[waiting[future]] = future.result()
            done(count)
    return hashes


def _compile(launch: Launch, capability: tuple[int, int]) -> str:
    with compile_for(capability):
        return str(compile_launch(launch).hash)


def _follow_parent(parent: int) -> None:
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
    launches = request_launches(request, checkpoint)

    def say(count: int) -> None:
        print(json.dumps({"done": count, "kernels": len(launches)}), flush=True)

    say(0)
    compile_launches(launches, request.card[0], processes, say)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"{len(launches)} kernels\n", "ascii")


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
