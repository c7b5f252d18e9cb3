"""What was planned beside what vLLM says it holds, and the same kept for the next plan.

Knows: which of vLLM's numbers stands for which lines of the ledger, as it tells fewer than the ledger has.
Does not know how they were read (``memory_lines.py``) or are shown.
"""

import contextlib
import time
from pathlib import Path

from vlfit.backends.vllm.memory_lines import Told
from vlfit.errors import UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.actual import Row
from vlfit.plan.ledger import Line
from vlfit.plan.search import Plan
from vlfit.plan.vllm import costs, starts
from vlfit.plan.vllm.starts import Began
from vlfit.units import GIB

_MOST_CONTEXT = 8 * GIB  # more than that others took in the meantime
_TWO_DIGITS = 0.01 * GIB
_TOGETHER = {
    "weights": ("weights.text", "weights.vision", "weights.embedding"),
    "workspace": ("vision_workspace", "text_workspace"),
}


def rows_of(plan: Plan, told: Told, process: int | None) -> tuple[Row, ...]:
    """Lines planned and held, in the order of the ledger; weights are one line, and so are workspaces.

    ``process``: bytes that the card lost from before the start until it served, None if that is not known.
    """
    planned = {line.line: line for line in plan.ledger}
    # vLLM counts with the weights what it makes beside them when it loads: positions, rows for pictures.
    made = 0 if told.weights is None else costs.made_with_weights(plan.model, plan.settings)
    moved = {"weights": made, "workspace": -made}
    held = {
        "weights": told.weights,
        "kv_cache": _cache(plan, told),
        "workspace": told.peak,
        "graphs": told.graph_pool,
        "context": _context(plan.gpu, told, with_libraries=True),
    }
    found = []
    for name in _order(plan.ledger):
        parts = [planned[part] for part in _TOGETHER.get(name, (name,)) if part in planned]
        if name == "reserve":
            continue
        how = parts[0].how
        remark = _REMARKS.get(name, "") if held.get(name) is not None else ""
        if name == "growth" and process is not None:
            remark = "not yet: it comes with the first requests"
        found.append(
            Row(
                name,
                sum(part.bytes for part in parts) + moved.get(name, 0),
                held.get(name),
                how,
                "; ".join(_notes(parts)),
                remark,
            )
        )
    return tuple(found)


_REMARKS = {
    "kv_cache": "given in bytes; vLLM prints two digits of GiB",
    "weights": "vLLM's own account of text model, tower, table of tokens and table of positions together",
    "workspace": "the peak of vLLM's trial run",
    "context": "from free memory before the start and at vLLM's first look, and its libraries",
}


def keep(plan: Plan, told: Told, process: int | None) -> Path | None:
    """Keep what this start held, for the next plan; the file, None if nothing was told, or none can be
    written. build for processors tells too little to be worth it.
    """
    settings = plan.settings
    if settings.vllm.in_ram or (told.weights is None and told.graph_pool is None):
        return None
    began = Began(
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        context=settings.context,
        image_tokens=settings.image_tokens,
        sequences=settings.sequences,
        chunk=settings.chunk,
        graphs=settings.graphs,
        kv_dtype=settings.kv_dtype,
        weights=told.weights,
        peak=told.peak,
        beside=told.apart,
        graph_pool=told.graph_pool,
        kv_cache=told.kv_cache,
        own_context=_context(plan.gpu, told, with_libraries=False),
        process=process,
    )
    with contextlib.suppress(UsageError):
        place = starts.place_of(plan.model, settings)
        return starts.keep(plan.gpu.name, settings.vllm.version, place, began)
    return None


def lost_since(plan: Plan, now: Machine) -> int | None:
    """Bytes of the plan's card that were free when it was made and are not any more; None without a card."""
    if plan.settings.vllm.in_ram:
        return None
    same = (gpu for gpu in now.gpus if (gpu.index, gpu.uuid) == (plan.gpu.index, plan.gpu.uuid))
    gpu = next(same, None)
    return None if gpu is None else max(plan.gpu.free - gpu.free, 0)


def _context(gpu: Gpu, told: Told, *, with_libraries: bool) -> int | None:
    """What the card lost before vLLM's first look; a number that others have spoilt is none."""
    if told.free is None:
        return None
    own = gpu.free - told.free
    if not 0 < own < _MOST_CONTEXT:
        return None
    return own + (told.apart or 0) if with_libraries else own


def _cache(plan: Plan, told: Told) -> int | None:
    """The bytes that were given, where vLLM says as many: it prints two digits of GiB."""
    given = next(line.bytes for line in plan.ledger if line.line == "kv_cache")
    if told.kv_cache is None or abs(told.kv_cache - given) > _TWO_DIGITS:
        return told.kv_cache
    return given


def _order(ledger: tuple[Line, ...]) -> list[str]:
    names = {part: name for name, parts in _TOGETHER.items() for part in parts}
    return list(dict.fromkeys(names.get(line.line, line.line) for line in ledger))


def _notes(parts: list[Line]) -> list[str]:
    return [part.note for part in parts] if len(parts) == 1 else []
