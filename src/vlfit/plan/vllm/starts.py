"""Memory that vLLM reported at starts on this machine: a JSON file for each card, version and model.

A broken file counts as none.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlfit.plan.calibration import cache_path, read_json_record, write_atomically
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.args import FLOAT32, vllm_args_of
from vlfit.units import GIB

VERSION = 1
_MOST = 2**20  # bytes of a file; a start has some four hundred
_MOST_STARTS = 64  # of one card, version and model; the oldest go first
_MOST_BYTES = 2**44  # no card has as much


@dataclass(frozen=True, slots=True)
class StartRecord:
    """What one start of vLLM reported about its memory, and the settings that it depends on.

    - ``date``: in ISO 8601. ``context`` to ``kv_dtype``: as in ``PlanSettings``.

    The others are in bytes; None: not reported.

    - ``weights``: what vLLM logs as "Model loading took".
    - ``peak``: of activations, in vLLM's profiling run.
    - ``beside``: part of vLLM's budget that is neither weights nor in torch's pool: CUDA's libraries.
    - ``graph_pool``: what vLLM logs as "Graph capturing finished ... took".
    - ``kv_cache``: available for the KV cache, or given by the person.
    - ``own_context``: by how much the card's free memory fell before vLLM first read it: CUDA's context.
    - ``process``: by how much it fell from the start of the process until the server was ready.
    """

    date: str
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    graphs: bool
    kv_dtype: str
    weights: int | None = None
    peak: int | None = None
    beside: int | None = None
    graph_pool: int | None = None
    kv_cache: int | None = None
    own_context: int | None = None
    process: int | None = None

    @property
    def key(self) -> tuple[int, int, int, bool, str]:
        """The settings that a start is found by: all but the context, which changes the KV cache alone."""
        return self.image_tokens, self.sequences, self.chunk, self.graphs, self.kv_dtype


_SIZES = ("weights", "peak", "beside", "graph_pool", "kv_cache", "own_context", "process")
_COUNTS = ("context", "image_tokens", "sequences", "chunk")


def starts_path(card: str, version: str, model: str) -> Path:
    """The path of the file of starts, which may not exist.

    ``card``: name of the GPU; ``version``: of vLLM, as its package gives it; ``model``: a ``model_key``.
    """
    return cache_path("vllm", card, version, model)


def save_start(card: str, version: str, model: str, record: StartRecord) -> Path:
    """Write ``record`` to ``starts_path(card, version, model)`` and return the path.

    It replaces an earlier start with the same ``key``; numbers that are None in ``record`` are taken from
    that one, except ``kv_cache``. The latest 64 starts are kept. Raises ``UsageError`` if the file cannot be
    written.
    """
    before = {each.key: each for each in read_records(starts_path(card, version, model))}
    known = before.pop(record.key, None)
    if known is not None:
        sizes = {name: getattr(record, name) for name in _SIZES}
        whole = {
            name: getattr(known, name) if size is None and name != "kv_cache" else size
            for name, size in sizes.items()
        }
        record = StartRecord(**{**asdict(record), **whole})
    starts = [*before.values(), record][-_MOST_STARTS:]
    path = starts_path(card, version, model)
    facts = {"version": VERSION, "starts": [asdict(each) for each in starts]}
    write_atomically(path, json.dumps(facts, indent=1) + "\n", "account of vLLM's memory")
    read_records.cache_clear()
    return path


def model_key(model: Model, settings: PlanSettings) -> str:
    """The name under which starts of ``model`` are kept: its ``source``, and what else changes its weights.

    That is, the number of cards that share each layer if more than one, and float32.
    """
    args = vllm_args_of(settings)
    shared = "" if args.tensor == 1 else f" over {args.tensor}"
    wide = "" if args.dtype != FLOAT32 else f" in {args.dtype}"
    return model.source + shared + wide


def find_start(card: str, version: str, model: str, settings: PlanSettings) -> StartRecord | None:
    """The record of a start with these ``settings``; None if there was none. The context is not compared.

    ``card``, ``version``, ``model``: as in ``starts_path``.
    """
    wanted = (
        settings.image_tokens,
        settings.sequences,
        settings.chunk,
        settings.graphs,
        settings.kv_dtype,
    )
    found = (each for each in _records(card, version, model) if each.key == wanted)
    return next(found, None)


def latest_start(card: str, version: str, model: str) -> StartRecord | None:
    """The latest start with any settings, for numbers that do not depend on them; None if there was none.

    ``card``, ``version``, ``model``: as in ``starts_path``.
    """
    return next(reversed(_records(card, version, model)), None)


def _records(card: str, version: str, place: str) -> tuple[StartRecord, ...]:
    """Every start of this kind. The path is cached, as a search needs it hundreds of times."""
    return read_records(
        _cached_file_of(card, version, place, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    )


@lru_cache(maxsize=256)
def _cached_file_of(card: str, version: str, place: str, cache: str | None, home: str | None) -> Path:
    """``starts_path``, cached by the folders in the environment."""
    return starts_path(card, version, place)


@lru_cache(maxsize=64)
def read_records(path: Path) -> tuple[StartRecord, ...]:
    """The starts in the file ``path``, the latest last; empty if it is missing or broken.

    Cached until ``save_start``: changes by other processes are not seen.
    """
    try:
        facts = read_json_record(path, _MOST)
        if facts["version"] != VERSION:
            return ()
        return tuple(_parse_record(each) for each in facts["starts"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ()


def _parse_record(facts: Any) -> StartRecord:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a file that vlfit did not write."""
    record = StartRecord(**{field.name: facts[field.name] for field in fields(StartRecord)})
    sizes = [getattr(record, name) for name in _SIZES]
    sound = (
        isinstance(record.date, str)
        and isinstance(record.kv_dtype, str)
        and isinstance(record.graphs, bool)
        and all(_is_count(getattr(record, name)) for name in _COUNTS)
        and all(size is None or (_is_count(size) and size <= _MOST_BYTES) for size in sizes)
        and (record.own_context or 0) <= 8 * GIB
    )
    if not sound:
        raise ValueError("a start that no vLLM had")
    return record


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
