"""Damaged GGUF files, opened, planned and run within bounds of time and memory: for ``test_gguf_fuzz.py``.

    python -m tests.gguf_mutations MODEL MMPROJ COUNT SEED [--run]

Prints, as JSON, how many files were opened and refused, what went wrong, and the slowest. Address space is
limited, so that a count that is believed ends in a ``MemoryError``; the number of each file goes to stderr
first, so that a crash names its own.
"""

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import pictures
from vlfit.api.conversation import ImagePart
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, read_gguf_header
from vlfit.checkpoint.source import open_checkpoint
from vlfit.client import VLM
from vlfit.errors import VlfitError
from vlfit.machine.cards import machine_with_card
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

MORE_BYTES = 768 * MIB  # of address space, beside what the program has when it begins
MORE_TO_RUN = 3072 * MIB  # torch's threads and an arena
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**48,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def mutated(content: bytes, header: GGUFHeader, seeded: random.Random) -> bytes:
    """``content`` with one thing wrong with it, or a few."""
    found = bytearray(content)
    for _ in range(seeded.choice((1, 1, 1, 2, 4))):
        seeded.choice(_WAYS)(found, header, seeded)
    return bytes(found)


def _put(found: bytearray, at: int, value: bytes) -> None:
    if 0 <= at <= len(found) - len(value):
        found[at : at + len(value)] = value


def _flip(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    for _ in range(seeded.randrange(1, 9)):
        at = seeded.randrange(min(header.data_start, len(found)))
        found[at] ^= 1 << seeded.randrange(8)


def _count(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    """Versions and counts at the start."""
    if seeded.random() < 0.3:
        _put(found, 4, struct.pack("<I", seeded.choice(NUMBERS) % 2**32))
    else:
        _put(found, seeded.choice((8, 16)), struct.pack("<Q", seeded.choice(NUMBERS)))


def _number(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    at = seeded.randrange(min(header.data_start, len(found)))
    form, size = seeded.choice((("<I", 32), ("<Q", 64)))
    _put(found, at, struct.pack(form, seeded.choice(NUMBERS) % 2**size))


def _value(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    """The type of a value, the type or count of an array (an array of arrays too), or the number itself."""
    key = seeded.choice(list(header.metadata)).encode()
    at = found.find(struct.pack("<Q", len(key)) + key)
    if at < 0:
        return
    at += 8 + len(key)
    way = seeded.randrange(4)
    if way == 0:
        _put(found, at, struct.pack("<I", seeded.randrange(14)))
    elif way == 1:
        _put(found, at + 4, struct.pack("<I", seeded.choice((9, 9, 8, seeded.randrange(14)))))
    elif way == 2:
        _put(found, at + 8, struct.pack("<Q", seeded.choice(NUMBERS)))
    else:
        _put(found, at + 4, struct.pack("<I", seeded.choice(NUMBERS) % 2**32))


def _entry(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    """Dimensions, type or offset of a tensor, or a letter of its name."""
    name = seeded.choice(list(header.tensors))
    raw = struct.pack("<Q", len(name)) + name.encode()
    at = found.find(raw)
    if at < 0:
        return
    start = at + len(raw)
    size = 8 * len(header.tensors[name].shape)
    way = seeded.randrange(5)
    if way == 0:
        _put(found, start, struct.pack("<I", seeded.choice(NUMBERS) % 2**32))
    elif way == 1:
        place = start + 4 + 8 * seeded.randrange(size // 8)
        _put(found, place, struct.pack("<Q", seeded.choice((*NUMBERS, 32, 64, 96, 256))))
    elif way == 2:
        _put(found, start + 4 + size, struct.pack("<I", seeded.randrange(45)))
    elif way == 3:
        _put(found, start + 8 + size, struct.pack("<Q", seeded.choice((*NUMBERS, 32, 64, 4096))))
    else:
        _put(found, at + 8 + seeded.randrange(len(name)), bytes([seeded.choice(b"0129.abk_")]))


def _end(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    most = header.data_start if seeded.random() < 0.7 else len(found)
    del found[seeded.randrange(1, most) :]


def _shift(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    """Bytes left out, or twice."""
    at, size = seeded.randrange(header.data_start), seeded.randrange(1, 64)
    if seeded.random() < 0.5:
        del found[at : at + size]
    else:
        found[at:at] = found[at : at + size]


def _data(found: bytearray, header: GGUFHeader, seeded: random.Random) -> None:
    """Weights of any bytes: infinite scales, numbers that are none."""
    if header.data_start + 64 < len(found):
        at = seeded.randrange(header.data_start, len(found) - 64)
        _put(found, at, seeded.choice((b"\xff" * 64, b"\x7c" * 64, seeded.randbytes(64))))


_WAYS: tuple[Callable[[bytearray, GGUFHeader, random.Random], None], ...] = (
    *(_flip, _count, _number, _value, _value, _entry, _entry, _end, _shift, _data),
)


def try_file(model: Path, run: bool) -> None:
    """Open ``model``, plan it, and with ``run`` caption a picture. Raises what any of them raises."""
    open_checkpoint(model)
    for each in find_exact_models(str(model)):
        find_plan([each], machine_with_card("RTX 5060"), Wishes())
    if run:
        with VLM(model, device="cpu", context=1024, sequences=1) as vlm:
            vlm.caption(ImagePart(pictures.picture(64, 48, seed=1)), max_tokens=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("mmproj", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    sources = {path: (path.read_bytes(), read_gguf_header(path)) for path in (options.model, options.mmproj)}
    result: dict[str, Any] = {"opened": 0, "refused": 0, "wrong": [], "slowest": 0.0, "codes": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write(folder, options, sources)
        try_file(folder / "model.gguf", options.run)  # imports everything; must not fail
        _limit(MORE_TO_RUN if options.run else MORE_BYTES)
        for number in range(options.seed, options.seed + options.count):
            print(number, file=sys.stderr, flush=True)
            seeded = random.Random(number)
            hurt = options.mmproj if seeded.random() < 0.3 else options.model
            content, header = sources[hurt]
            _write(folder, options, {**sources, hurt: (mutated(content, header, seeded), header)})
            began = time.perf_counter()
            try:
                try_file(folder / "model.gguf", options.run)
                result["opened"] += 1
            except VlfitError as error:
                result["refused"] += 1
                result["codes"].setdefault(error.code, []).append([number, error.message])
            except Exception:
                result["wrong"].append([number, traceback.format_exc()[-1500:]])
            result["slowest"] = max(result["slowest"], time.perf_counter() - began)
    print(json.dumps(result))


def _write(folder: Path, options: argparse.Namespace, contents: dict[Path, tuple[bytes, GGUFHeader]]) -> None:
    for path, name in ((options.model, "model.gguf"), (options.mmproj, "mmproj-model.gguf")):
        (folder / name).write_bytes(contents[path][0])


def _limit(more: int) -> None:
    """Let the address space grow by ``more`` bytes, and no further."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
