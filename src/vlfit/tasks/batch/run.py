"""A batch in one call, for whoever has a backend open: sources in, an output, a tally back.

Knows the order of opening and closing. Does not know how a backend is opened, signals, or what is shown.
"""

from collections.abc import Sequence
from pathlib import Path

from vlfit.backends.base import LocalBackend
from vlfit.engine.sampling import SamplingParams
from vlfit.tasks.batch.crew import Crew
from vlfit.tasks.batch.job import Job, Work
from vlfit.tasks.batch.opening import check_numbers, pace_for
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.progress import Progress, Tally
from vlfit.tasks.batch.runner import Runner
from vlfit.tasks.batch.sources import SourceOptions, open_sources
from vlfit.tasks.batch.wish import Wish


def run_batch(
    backend: LocalBackend,
    sources: Sequence[str],
    output: Path,
    wish: Wish,
    sampling: SamplingParams,
    *,
    at_once: int | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Tally:
    """Ask ``wish`` about every picture of ``sources`` that is not in ``output`` yet.

    ``at_once``: requests under way; None: as many as the backend runs. ``limit``: of so many pictures at
    most. Raises ``UsageError`` for an output of another job, and what concerns all pictures; those that
    failed by themselves are counted, and listed beside the output.
    """
    check_numbers(at_once)
    job = Job(wish, sampling, tuple(sources), output)
    source = open_sources(job.sources, SourceOptions(output=output))
    place = Output(job, again=retry_failed)
    try:
        place.begin(backend.model)
        crew = Crew(Work.of(job), backend, pace_for(backend, at_once))
        return Runner(crew, source, place, progress=progress, limit=limit).run()
    finally:
        place.close()
