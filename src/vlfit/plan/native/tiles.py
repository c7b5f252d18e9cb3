"""Tile sizes of GEMMs with quantized weights, and how prompts are dequantized, for engine and plan.

Tiles are built in, so no first start waits for autotuning; those measured on a card by ``vlfit plan
--calibrate`` replace them, from a JSON file for each card, Triton and kernels. A broken file, or one of other
kernels, is ignored.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit.checkpoint.quantization import FP8, INT4, INT5, INT6, INT8
from vlfit.machine.cards import FP8_CAPABILITY as NATIVE_FP8_CAPABILITY
from vlfit.plan.calibration import cache_path, read_json_record, write_atomically
from vlfit.units import GIB, KIB, MIB

MANY_MULTIPROCESSORS = 64  # from here on memory bounds what one request does, below what each of them does
_SHARED_MEMORY = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}  # KiB
WARPS_TO_FILL_GPU = 1200  # a GEMM with fewer is split
MOST_SPLITS = 16
# Most rows of a GEMM that unpacks weights on the fly, and that may be split over its inputs (split-K). More
# are multiplied by torch, from weights that are dequantized first, in slices that stay in the L2 cache.
# Microseconds of a layer of 4B, fused with the best tiles and dequantized first, on an H200 and on 30 of its
# multiprocessors (docs/log.md): int4, 64 rows: 104 and 144, 303 and 334; 128 rows: 193 and 147, 472 and 345;
# 256 rows: 314 and 185, 818 and 472. FP8, 64 rows: 85 and 150, 247 and 311; 128 rows: 148 and 155, 395 and
# 326.
MAX_FUSED_ROWS = 64
# FP8 GEMMs of prompts with at least this many multiply-adds for each multiprocessor go to cuBLAS on Hopper,
# which takes a quarter to a third less time. That is 53 us of our kernel's 134 for gate and up of 4B on an
# H200, about what calling it through torch costs (docs/log.md).
CUBLAS_MIN_MACS = 15 * 10**7
FORMS = (FP8, INT8, INT4)  # with tiles that are measured on a card
# Rows up to which each format has tiles of its own. One row has a kernel of its own, with tiles that are not
# measured (``kernels/gemm/one_row.py``); where that does not take it, it has the tiles of 8.
REGIMES = (8, 16)


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """How a GEMM kernel is cut: each program computes ``rows`` x ``outputs``, ``inputs`` at a time.

    - ``warps``, ``stages``: of a program: Triton's ``num_warps`` and ``num_stages``.
    - ``parts``: 1, or as many as ``warps``: each warp then sums over its own part of the inputs of a step.
    - ``busy``: split-K doubles the number of programs until at least this many warps are launched.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1
    busy: int = WARPS_TO_FILL_GPU


Table = Mapping[tuple[str, int], GemmTiles]  # by form and regime

# What `vlfit plan --calibrate` found on one H100; FP8 of up to 8 rows has a stage less, by which steps of 2B
# take a twelfth less and of 4B a fiftieth more (docs/log.md).
BUILT_IN: Table = {
    (FP8, 8): GemmTiles(8, 64, 128, 4, 3),
    (FP8, 16): GemmTiles(16, 32, 128, 2, 4, busy=640),
    (INT8, 8): GemmTiles(8, 64, 128, 2, 3, busy=600),
    (INT8, 16): GemmTiles(16, 32, 128, 2, 6, busy=640),
    (INT4, 8): GemmTiles(8, 64, 256, 4, 3),
    (INT4, 16): GemmTiles(16, 32, 256, 2, 4),
}
# Of GGUF's matrices of 5 and 6 bits, on every card. Microseconds of a layer of 4B in Q6_K, eight rows, on an
# H100 and on 30 of its multiprocessors (docs/log.md): 73.1 and 212.6, with 64 outputs and four warps 81.7 and
# 213.3.
GGUF_TILES: Table = {
    (INT5, 8): GemmTiles(8, 64, 128, 4, 3),
    (INT5, 16): GemmTiles(16, 32, 128, 2, 4),
    (INT6, 8): GemmTiles(8, 32, 128, 2, 3, busy=800),
    (INT6, 16): GemmTiles(16, 32, 128, 2, 4),
}
# For more rows, by form and most rows, on every card. Microseconds of the same layer, of one tile for all
# forms (32 or 64 x 64 x 128, 4 warps) and of these: int4, 32 rows: 101 and 65, 253 and 207; 64 rows: 110 and
# 114, 350 and 303; int8, 64 rows: 133 and 113, 351 and 292. The others are best as they are.
MORE_ROWS: Table = {
    (FP8, 32): GemmTiles(32, 64, 128, 4, 3),
    (FP8, 64): GemmTiles(64, 64, 128, 4, 3),
    (INT8, 32): GemmTiles(32, 64, 128, 4, 3),
    (INT8, 64): GemmTiles(64, 128, 64, 8, 3),
    (INT4, 32): GemmTiles(32, 32, 256, 2, 3),
    (INT4, 64): GemmTiles(64, 128, 64, 8, 3),
    (INT5, 32): GemmTiles(32, 64, 128, 4, 3),
    (INT5, 64): GemmTiles(64, 128, 64, 8, 3),
    (INT6, 32): GemmTiles(32, 64, 128, 4, 3),
    (INT6, 64): GemmTiles(64, 128, 64, 8, 3),
}
# In place of the built-in tiles of int8 for up to 8 rows where groups of inputs are smaller than a step, as
# in GGUF's Q8_0.
GROUPED_INT8 = GemmTiles(8, 64, 128, 4, 3)


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory of a multiprocessor, by NVIDIA's table of compute capabilities; 100 KiB if not
    known, as of 8.6, 8.9 and 12.0.
    """
    return _SHARED_MEMORY.get(capability, 100) * KIB


def tiles_for(rows: int, form: str, table: Table = BUILT_IN) -> GemmTiles:
    """Tiles for a GEMM of ``rows`` rows of 16-bit activations with weights in ``form``.

    ``table``: tiles for up to 16 rows of ``FORMS``; all others are the same for every card.
    """
    for regime in REGIMES:
        if rows <= regime:
            return table[form, regime] if form in FORMS else GGUF_TILES[form, regime]
    return MORE_ROWS[form, 32 if rows <= 32 else 64]


def splits_for(rows: int, outputs: int, inputs: int, tiles: GemmTiles) -> int:
    """How many programs share each tile by split-K: a power of two up to ``MOST_SPLITS``; 1: no split.

    ``rows``: of activations; ``outputs``, ``inputs``: of the linear layer.
    """
    if rows > MAX_FUSED_ROWS:
        return 1
    warps = -(-outputs // tiles.outputs) * -(-rows // tiles.rows) * tiles.warps
    splits = 1
    while splits < MOST_SPLITS and warps * splits < tiles.busy and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits


# --- tiles measured on a card (``tuning/tune.py``) ----------------------------------------------------------

VERSION = 2
_MOST = 2**16  # bytes of a file; real ones have two thousand
# Values that a kernel may be compiled with.
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
class CardKind:
    """A kind of card: ``name`` as the driver reports it, and compute ``capability``, such as (8, 9)."""

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
    """A short hash of the source files in ``kernels/``. Tiles measured with another hash are not used."""
    sources = sorted((Path(__file__).parent.parent.parent / "kernels").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def tiles_path(card: CardKind) -> Path:
    """The path of the file of tiles measured on ``card`` with the installed Triton and these kernels.

    It may not exist.
    """
    capability = ".".join(map(str, card.capability))
    return cache_path("tiles", card.name, capability, triton_version(), kernels_version())


def save_tiles(card: CardKind, table: Table) -> Path:
    """Write ``table`` to ``tiles_path(card)`` and return the path. Raises ``UsageError`` if that fails.

    ``load_tiles`` returns it from then on.
    """
    tiles = {form: {str(regime): asdict(table[form, regime]) for regime in REGIMES} for form in FORMS}
    facts = {
        "version": VERSION,
        "gpu": card.name,
        "capability": list(card.capability),
        "triton": triton_version(),
        "kernels": kernels_version(),
        "tiles": tiles,
    }
    path = tiles_path(card)
    write_atomically(path, json.dumps(facts, indent=2) + "\n", "tiles")
    load_tiles.cache_clear()
    return path


@cache
def load_tiles(card: CardKind) -> Table:
    """The table of GEMM tiles for ``card``: measured by ``vlfit plan --calibrate``, else built in.

    Keys are (weights format, most rows). Reads ``tiles_path(card)``. Returns ``BUILT_IN`` if Triton is not
    installed, or the file is missing or broken; never raises. The result is cached until ``save_tiles`` in
    this process, so an engine keeps the tiles that it started with.
    """
    if not triton_version():
        return BUILT_IN
    try:
        facts = read_json_record(tiles_path(card), _MOST)
        return _table(facts["tiles"], card) if facts["version"] == VERSION else BUILT_IN
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return BUILT_IN


def _table(facts: Any, card: CardKind) -> Table:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a file that vlfit did not write."""
    return {
        (form, regime): _tiles(facts[form][str(regime)], form, regime, card)
        for form in FORMS
        for regime in REGIMES
    }


def _tiles(facts: Any, form: str, regime: int, card: CardKind) -> GemmTiles:
    values = {field.name: facts[field.name] for field in fields(GemmTiles)}
    if not all(type(value) is int for value in values.values()):
        raise ValueError("a number of tiles is no whole one")
    tiles = GemmTiles(**values)
    sound = (
        tiles.rows == (16 if regime > 8 else 8)
        and tiles.parts in (1, tiles.warps)
        and 1 <= tiles.busy <= _MOST_BUSY
        and all(values[name] in possible for name, possible in _POSSIBLE.items())
    )
    if not sound or not _has_room(card, form, tiles):
        raise ValueError("tiles that no kernel is compiled with")
    return tiles


def _has_room(card: CardKind, form: str, tiles: GemmTiles) -> bool:
    """Whether a program of ``tiles`` fits ``card``.

    Shared memory holds the codes and rows of all load stages, registers the weights of a step in 16 bits and
    its sums in 32.
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


# --- GEMMs of many rows (``kernels/gemm/quantized.py``, ``kernels/gemm/fp8.py``)
# -----------------------------

# A slice of this size stays in the L2 cache of newer cards (24 MB and more) until it is multiplied, and
# has tiles enough for torch's product to fill a card with 8 or 16 GB.
SCRATCH_BYTES = 24 * MIB
# Larger cards wait for the host to launch (30 us a kernel, docs/log.md): fewer slices are faster. This
# holds gate and up of 2B whole and of 4B in two, down of 4B whole and of 8B in two.
ROOMY_SCRATCH_BYTES = 48 * MIB
# Of memory that is free: there it does not matter. With 30 multiprocessors a first token of 4B int4 takes
# 64 ms to compute and 25 to launch, so CUDA graphs of long prompts would cost 45 to 200 MiB for nothing.
ROOMY = 18 * GIB
FP8_ROW_MULTIPLE = 16  # rows in FP8 are allocated in multiples of it


@dataclass(frozen=True, slots=True)
class DequantConfig:
    """How GEMMs of many rows (prompts, pictures) are computed with quantized weights on a card.

    - ``scratch_bytes``: size of the buffer that slices of weights are dequantized into.
    - ``fp8_activations``: activations are quantized to FP8, too, so that FP8 tensor cores multiply FP8
      weights without dequantizing them.
    - ``captures_prompts``: long prompts, and the vision tower, quantized or not, are captured as CUDA graphs.
    """

    scratch_bytes: int = SCRATCH_BYTES
    fp8_activations: bool = False
    captures_prompts: bool = False


DEFAULT_DEQUANT_CONFIG = DequantConfig()


def dequant_config_for(free: int, capability: tuple[int, int]) -> DequantConfig:
    """The configuration for a card with ``free`` bytes of free memory and compute ``capability``.

    From 18 GiB on, the buffer is larger, and long prompts and the vision tower have CUDA graphs.
    """
    roomy = free >= ROOMY
    scratch = ROOMY_SCRATCH_BYTES if roomy else SCRATCH_BYTES
    return DequantConfig(scratch, capability >= NATIVE_FP8_CAPABILITY, roomy)
