"""The tiles that were measured to be the fastest on a card: a JSON file for each card, Triton and kernels.

Knows the fields, what is possible in them on a card, and where the files lie. Does not know how tiles are
measured (``engine/tune.py``). A file that is broken, or of other kernels, is as good as none: what is built
in is used.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit.checkpoint.quantization import INT4
from vlfit.plan.kept import kept_file, write_whole
from vlfit.plan.tiles import BUILT_IN, FORMS, REGIMES, Table, Tiles
from vlfit.units import KIB

VERSION = 1
_MOST = 2**16  # bytes of a file; real ones have two thousand
# What a kernel may be compiled with, each by itself.
_POSSIBLE = {
    "outputs": (16, 32, 64, 128, 256),
    "inputs": (64, 128, 256, 512, 1024),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6),
}
# KiB of shared memory that one program may have, and a lane's registers of 4 bytes (CUDA C++ Programming
# Guide, technical specifications per compute capability); all consumer cards since Ampere have as much.
_SHARED = {
    (7, 0): 96,
    (7, 2): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 7): 163,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
}
_CONSUMER_SHARED = 99
_REGISTERS, _LANES = 255, 32
_LEAST_PART = 16  # inputs that a matrix unit takes of 16-bit numbers
_MOST_BUSY = 100_000  # warps; the largest card has 10,000 at once


@dataclass(frozen=True, slots=True)
class Card:
    """What tiles are measured for: ``name`` as the driver has it, and the compute capability."""

    name: str
    capability: tuple[int, int]


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The version of the installed Triton, "" if there is none. Does not import it."""
    for name in ("triton", "triton-windows"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


@lru_cache(maxsize=1)
def kernels_version() -> str:
    """What changes when a kernel does: a hash of their sources, shortened."""
    sources = sorted((Path(__file__).parent.parent / "engine" / "kernels").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def file_of(card: Card) -> Path:
    """Where the tiles of ``card`` are kept, for this Triton and these kernels."""
    capability = ".".join(map(str, card.capability))
    return kept_file("tiles", card.name, capability, triton_version(), kernels_version())


def save(card: Card, table: Table) -> Path:
    """Keep ``table``, whole or not at all; the file. Raises ``UsageError`` if it cannot be written."""
    tiles = {form: {str(regime): asdict(table[form, regime]) for regime in REGIMES} for form in FORMS}
    facts = {
        "version": VERSION,
        "gpu": card.name,
        "capability": list(card.capability),
        "triton": triton_version(),
        "kernels": kernels_version(),
        "tiles": tiles,
    }
    path = file_of(card)
    write_whole(path, json.dumps(facts, indent=2) + "\n", "tiles")
    table_of.cache_clear()
    return path


@cache
def table_of(card: Card) -> Table:
    """What was measured on ``card``, and else what is built in. Read once: an engine keeps its tiles."""
    if not triton_version():
        return BUILT_IN
    try:
        with file_of(card).open("rb") as file:
            data = file.read(_MOST + 1)
        facts: Any = json.loads(data) if len(data) <= _MOST else None
        return _table(facts["tiles"], card) if facts["version"] == VERSION else BUILT_IN
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return BUILT_IN


def _table(facts: Any, card: Card) -> Table:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what vlfit does not write."""
    return {
        (form, regime): _tiles(facts[form][str(regime)], form, regime, card)
        for form in FORMS
        for regime in REGIMES
    }


def _tiles(facts: Any, form: str, regime: int, card: Card) -> Tiles:
    values = {field.name: facts[field.name] for field in fields(Tiles)}
    if not all(type(value) is int for value in values.values()):
        raise ValueError("a number of tiles is no whole one")
    tiles = Tiles(**values)
    sound = (
        tiles.rows == (16 if regime > 8 else 8)
        and tiles.parts in (1, tiles.warps)
        and 1 <= tiles.busy <= _MOST_BUSY
        and all(values[name] in possible for name, possible in _POSSIBLE.items())
    )
    if not sound or not _has_room(card, form, tiles):
        raise ValueError("tiles that no kernel is compiled with")
    return tiles


def _has_room(card: Card, form: str, tiles: Tiles) -> bool:
    """Whether a program of ``tiles`` has room on ``card``: in shared memory for the codes and rows of all
    stages of loads, in registers for the weights of a step in 16 bits and its sums in 32.
    """
    codes = tiles.outputs * tiles.inputs
    step = codes // (2 if form == INT4 else 1) + tiles.rows * tiles.inputs * 2
    shared = _SHARED.get(card.capability, _CONSUMER_SHARED) * KIB
    held = codes * 2 + tiles.outputs * tiles.rows * 4 * tiles.parts
    return (
        step * tiles.stages <= shared
        and held <= tiles.warps * _LANES * _REGISTERS * 4
        and tiles.inputs // tiles.parts >= _LEAST_PART
    )
