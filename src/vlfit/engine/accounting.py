"""The account of an engine, drawn up from what it has at this moment. Any thread may ask: nothing is waited
for, locked or woken. Knows where each figure lies. Does not know who looks (``account.py`` has the records).
"""

import time
from typing import TYPE_CHECKING

from vlfit.engine.account import EngineAccount, EngineSettings, Holdings, Pool
from vlfit.engine.holdings import resident_bytes, torch_statistics
from vlfit.engine.layers.halves import halves_on

if TYPE_CHECKING:
    from vlfit.engine.engine import Engine


def account_of(engine: "Engine") -> EngineAccount:
    """What ``engine`` has done and what it holds."""
    runner, scheduler, pool = engine.runner, engine.scheduler, engine.pool
    asleep = engine.sleep.asleep
    return EngineAccount(
        time.perf_counter() - engine.built,
        _settings(engine),
        len(scheduler.running),
        len(scheduler.waiting),
        Pool(
            pool.blocks,
            pool.blocks - pool.free,
            pool.block_size,
            len(scheduler.prefixes or ()),
            engine.pressure.planned,
        ),
        Holdings(
            dict.fromkeys(engine.weights, 0) if asleep else engine.weights,
            runner.cache.nbytes,
            runner.image_cache.used_bytes,
            runner.image_cache.limit_bytes,
            resident=resident_bytes(),
            resident_before=engine.resident_before,
            graphs=sum(each.nbytes for each in (runner.graphs, runner.recorded) if each is not None),
            **torch_statistics(engine.device),
        ),
        engine.counters,
        scheduler.pauses,
        asleep,
    )


def _settings(engine: "Engine") -> EngineSettings:
    return EngineSettings(
        device=str(engine.device),
        gpu_uuid=engine.gpu_uuid,
        dtype=str(engine.dtype).removeprefix("torch."),
        value_bytes=engine.dtype.itemsize,
        context=engine.context,
        image_tokens=engine.image_tokens,
        sequences=engine.options.sequences,
        chunk=engine.options.chunk,
        kv_tokens=engine.pool.blocks * engine.pool.block_size,
        offload=len(engine.waiting_layers),
        halves=halves_on(engine.device, engine.dtype),
        kv_dtype=engine.kv_dtype,
        speculate=engine.options.speculate,
    )
