"""A server's memory at the moments of a soak, and what it grew by from one to another.

Resident RAM is anonymous pages, which are the process's own, and pages of files: code of libraries, which is
in RAM from when it first runs until the system wants the room. Both count. Of what is anonymous the engine
says how much are features of pictures that it keeps; that is bounded and part of the plan. Pages are counted
one by one (``smaps_rollup``): what Linux says in ``status`` is added up for each processor apart, and on a
machine with 100 of them it may be off by more than what is looked for. Knows /proc and the server's account.
Does not know requests.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import MIB
from benchmarks.served import Served


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes after so many ``requests``, ``seconds`` after the start of the command.

    ``name`` is empty where requests were running. ``card``: NVML's, of the process. ``image_cache`` is part
    of ``anonymous``, and that of ``resident``.
    """

    name: str
    requests: int
    seconds: float
    card: int
    resident: int
    anonymous: int
    image_cache: int

    @property
    def files(self) -> int:
        """Pages of files, and memory shared with other processes."""
        return self.resident - self.anonymous


def look(served: Served, name: str, requests: int) -> Moment:
    """What ``served`` has now."""
    resident, anonymous = pages_of(served)
    cache = served.ask("/v1/vlfit/status").get("image_cache", {}).get("bytes", 0)
    return Moment(name, requests, served.seconds, served.on_card(), resident, anonymous, cache)


def pages_of(served: Served) -> tuple[int, int]:
    """Resident and anonymous bytes."""
    try:
        text = Path(f"/proc/{served.pid}/smaps_rollup").read_text("ascii", errors="replace")
    except OSError:  # an old kernel
        return served.memory("VmRSS"), served.memory("RssAnon")
    found = [re.search(rf"^{line}:\s+(\d+) kB", text, re.MULTILINE) for line in ("Rss", "Anonymous")]
    resident, anonymous = (int(match[1]) * 1024 if match else 0 for match in found)
    return resident, anonymous


def table(moments: Sequence[Moment]) -> list[list[str]]:
    """Rows of a table: each moment, in MiB."""
    rows = [["requests", "s", "card", "resident", "of it anonymous", "pages of files", "kept features"]]
    for each in moments:
        counts = (each.card, each.resident, each.anonymous, each.files, each.image_cache)
        rows.append([f"{each.requests} {each.name}".strip(), f"{each.seconds:.0f}", *map(in_mib, counts)])
    return rows


def growth(before: Moment, after: Moment) -> str:
    """In words, what RAM grew by and whose it is."""
    files, cache = after.files - before.files, after.image_cache - before.image_cache
    own = after.anonymous - before.anonymous - cache
    return (
        f"{(after.resident - before.resident) / MIB:+.1f} MiB of RAM from {before.name} to {after.name}: "
        f"{cache / MIB:+.1f} kept features, {own / MIB:+.1f} anonymous beside them, "
        f"{files / MIB:+.1f} of files"
    )


def in_mib(count: int) -> str:
    return f"{count / MIB:,.1f}"
