"""One process that loads a checkpoint with the native engine, runs the worst case, and says what it held."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ledger_job import Held, LedgerJob, Meter, begin, end

if TYPE_CHECKING:
    from vlfit.engine.engine import Engine


def main() -> None:
    # All that is slow and needs no GPU comes first: the process before may still be measuring.
    import torch

    from vlfit.engine.calibrate import workspace_bytes
    from vlfit.engine.rehearsal import rehearse

    job = begin()
    started = time.perf_counter()
    meter = Meter()
    torch.empty(1, device=job.device)
    torch.cuda.synchronize()
    bare = meter.process() - torch.cuda.memory_reserved()
    workspace = workspace_bytes(torch.device(job.device))
    ready = time.perf_counter()
    engine = load(job)
    torch.cuda.synchronize()
    loaded, reserved_loaded = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    at_load = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    reached = rehearse(engine, job.image_tokens)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    end(
        Held(
            process=meter.process(),
            own=meter.own(),
            reserved=torch.cuda.memory_reserved(),
            reserved_loaded=reserved_loaded,
            peak=torch.cuda.max_memory_allocated(),
            loaded=loaded,
            bare_context=bare,
            workspace=workspace,
            lines=held_lines(engine),
            reached=asdict(reached),
            seconds={"start": ready - started, "load": at_load - ready, "run": ended - at_load},
        )
    )


def load(job: LedgerJob) -> "Engine":
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import Engine
    from vlfit.engine.loader import Loader
    from vlfit.engine.made_up import MadeUpLoader
    from vlfit.engine.options import EngineOptions

    options = EngineOptions(
        device=job.device,
        context=job.context,
        sequences=job.sequences,
        chunk=job.chunk,
        image_tokens=job.image_tokens,
    )
    loader = Loader if job.read_files else MadeUpLoader
    return Engine(open_checkpoint(Path(job.folder)), options, None, loader)


def held_lines(engine: "Engine") -> dict[str, int]:
    """Bytes of the tensors that the engine's parts hold, by the ledger's lines."""
    holdings = engine.account().holdings
    return {**holdings.weights, "kv_cache": holdings.kv_cache}


if __name__ == "__main__":
    main()
