"""A dry run: how many pictures there are, and how long the first few take. Writes nothing."""

import json
import time
from itertools import islice
from typing import Any

from vlfit.tasks.batch.crew import Crew
from vlfit.tasks.batch.item import Source
from vlfit.tasks.batch.output import Output


def try_out(crew: Crew, source: Source, output: Output | None, total: int | None) -> dict[str, Any]:
    """Do as many of what is left as run at once, twice over, and reckon from that.

    ``output``: that of earlier runs; None: there is none. ``total``: items of the source, if known.
    """
    settled_before = output.done_before + output.failed_before if output is not None else 0
    fresh = (item for item in source if output is None or not output.is_settled(item.key))
    began, size = time.monotonic(), 0
    outcomes = list(crew.outcomes(islice(fresh, 2 * crew.pace.at_once)))
    seconds = time.monotonic() - began
    for outcome in outcomes:
        size += len(json.dumps(outcome.record, ensure_ascii=False)) + 1 if outcome.record is not None else 0
    tried = len(outcomes)
    left = None if total is None else max(0, total - settled_before)
    known = left is not None and tried > 0
    return {
        "pictures": total,
        "about": bool(getattr(source, "about", False)),
        "settled_before": settled_before,
        "tried": tried,
        "failed": sum(outcome.error is not None for outcome in outcomes),
        "seconds": round(seconds, 3),
        "pictures_per_s": round(tried / seconds, 3) if tried else None,
        "seconds_for_all": round(seconds / tried * left, 1) if known and left is not None else None,
        "bytes_for_all": size * left // tried if known and left is not None else None,
    }
