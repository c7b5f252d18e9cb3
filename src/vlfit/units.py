"""Bytes and durations as people read them. Knows nothing else."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


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


def format_seconds(seconds: float) -> str:
    """``seconds`` as ``"12 ms"``, ``"3.4 s"`` or ``"2 min 05 s"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
