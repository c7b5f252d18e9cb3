"""Bytes, durations and counts as people write and read them."""

import math
import re

from vlfit.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

# A GB is 10^9 bytes, a GiB 2^30, as the standards have it; a lone letter is the binary unit, as in `free -h`.
_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}
_SIZE = re.compile(r"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_MOST = 2**60
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")


def parse_bytes(text: str, name: str = "") -> int:
    """Parse ``"8151MiB"``, ``"8 GB"`` or ``"7.5 GiB"`` into bytes, rounded. Only 0 may lack a unit.

    ``name``: an option, which starts the error messages. Raises ``UsageError`` for anything else, negative
    sizes, and more than 2^60 bytes.
    """
    about = f"{name}: " if name else ""
    found = _SIZE.fullmatch(text.strip())
    text = text if len(text) <= 40 else text[:37] + "..."
    if found is None:
        raise UsageError(f"{about}{text!r} is not a size", "Write it like 951MiB, 8 GB or 7.5GiB.")
    sign, number, unit = found[1], float(found[2]), found[3]
    if sign == "-" and number:
        raise UsageError(
            f"{about}a size cannot be negative: {text!r}", "Write it like 951MiB, 8 GB or 7.5GiB."
        )
    if not unit and number:
        raise UsageError(f"{about}{text!r} has no unit", f"Write {found[2]}MiB, or {found[2]}B for bytes.")
    factor = _UNITS.get(unit.lower(), 0) if unit else 1
    if not factor:
        raise UsageError(
            f"{about}unknown unit {unit!r} in {text!r}", "Units are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB."
        )
    if not math.isfinite(number) or number * factor > _MOST:
        raise UsageError(f"{about}{text!r} is larger than any memory", "Check the unit.")
    return round(number * factor)


def parse_gibibytes(text: str, name: str = "") -> int:
    """Parse a size into bytes as ``parse_bytes`` does, but a bare number is in GiB: ``"1.5"``.

    ``name`` and errors: as for ``parse_bytes``.
    """
    return parse_bytes(f"{text}GiB" if text.strip()[-1:].isdigit() else text, name)


def parse_seconds(text: str, name: str = "") -> float:
    """Parse ``"90s"``, ``"5m"`` (minutes), ``"5 min"``, ``"1.5h"`` or ``"2d"`` into seconds, above 0.

    ``name``: an option, which starts the error messages. Raises ``UsageError`` for anything else, 0, and a
    number without a unit.
    """
    about = f"{name}: " if name else ""
    found = _DURATION.fullmatch(text.strip())
    text = text if len(text) <= 40 else text[:37] + "..."
    if found is None:
        raise UsageError(f"{about}{text!r} is not a duration", "Write it like 90s, 5m or 1h.")
    if not found[2] and float(found[1]):
        raise UsageError(f"{about}{text!r} has no unit", f"Write {found[1]}s, {found[1]}m or {found[1]}h.")
    factor = _SECONDS.get(found[2].lower()) if found[2] else 1
    if factor is None:
        raise UsageError(f"{about}unknown unit {found[2]!r} in {text!r}", "Units are s, m, h and d.")
    seconds = float(found[1]) * factor
    if not 0 < seconds < math.inf:
        raise UsageError(f"{about}{text!r} is no time to wait", "Write it like 90s, 5m or 1h.")
    return seconds


def format_bytes(count: int) -> str:
    """``count`` bytes as ``"812 B"``, ``"4.0 KiB"``, ``"951 MiB"`` or ``"4.88 GiB"``."""
    magnitude = abs(count)
    if magnitude < KIB:
        return f"{count} B"
    if magnitude < MIB:
        return f"{count / KIB:.1f} KiB"
    if magnitude < GIB:
        return f"{count / MIB:.1f} MiB" if magnitude < 100 * MIB else f"{count / MIB:.0f} MiB"
    return f"{count / GIB:.2f} GiB"


def format_bandwidth(bytes_per_second: int) -> str:
    """A bandwidth as ``"448 GB/s"`` or ``"31.5 GB/s"``, in powers of ten as in data sheets."""
    speed = bytes_per_second / 10**9
    return f"{speed:.1f} GB/s" if speed < 100 else f"{speed:.0f} GB/s"


def format_seconds(seconds: float) -> str:
    """A duration as ``"12 ms"``, ``"3.4 s"`` or ``"2 min 05 s"``; hours as minutes."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``count`` with its noun: ``"1 token"``, ``"2,048 tokens"``. ``plural``: where an s is not enough."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
