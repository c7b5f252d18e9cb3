"""One process that loads a checkpoint with the native engine, runs the worst case, and says what it held."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ledger_job import Held, LedgerJob, Meter, begin, end

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine


def main() -> None:
    # All that is slow and needs no GPU comes first: the process before may still be measuring.
    import torch

    from vlfit.engine.device import choose_device
    from vlfit.engine.execution import warmup as every_kind
    from vlfit.engine.execution.warmup import run_worst_case

    job = begin()
    started = time.perf_counter()
    meter = Meter()
    choose_device(job.device)  # starts CUDA, with the engine's own limits
    torch.cuda.synchronize()
    bare = meter.process() - torch.cuda.memory_reserved()
    ready = time.perf_counter()
    engine = load(job)
    torch.cuda.synchronize()
    loaded, reserved_loaded = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    at_load = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    reached = run_worst_case(engine, job.image_tokens)
    every_kind.warm_up_kernels(engine)  # as a server does: each kernel is loaded by now
    torch.cuda.synchronize()
    ended = time.perf_counter()
    process, own, reserved = meter.process(), meter.own(), torch.cuda.memory_reserved()
    end(
        Held(
            process=process,
            own=own,
            reserved=reserved,
            reserved_loaded=reserved_loaded,
            peak=torch.cuda.max_memory_allocated(),
            loaded=loaded,
            bare_context=bare,
            workspace=products_workspace(),
            lines=held_lines(engine),
            reached=asdict(reached),
            seconds={"start": ready - started, "load": at_load - ready, "run": ended - at_load},
        )
    )


def load(job: LedgerJob) -> "NativeEngine":
    from vlfit.api.engine_options import EngineOptions
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.loading.loader import Loader
    from vlfit.plan.native.cost import TIGHT_REQUEST, kv_tokens
    from vlfit.tuning.calibration_run import RandomWeightsLoader

    options = EngineOptions(
        device=job.device,
        max_model_len=job.context,
        max_num_seqs=job.sequences,
        max_num_batched_tokens=job.chunk,
        image_tokens=job.image_tokens,
        kv_tokens=kv_tokens(job.context, job.sequences, TIGHT_REQUEST) if job.tight else None,
    )
    loader = Loader if job.read_files else RandomWeightsLoader
    return NativeEngine(open_checkpoint(Path(job.folder)), options, None, loader)


def held_lines(engine: "NativeEngine") -> dict[str, int]:
    """Bytes that the engine's parts hold, by the ledger's lines."""
    holdings = engine.account().memory
    return {**holdings.weights, "kv_cache": holdings.kv_cache, "graphs": holdings.cuda_graphs}


def products_workspace() -> int:
    """What the process took of torch's pool for torch's own matrix products; it is given back here."""
    import torch

    if not torch.cuda.is_available():
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
