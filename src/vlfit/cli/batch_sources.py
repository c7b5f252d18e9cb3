"""The pictures of ``vlfit batch``, as they were named: opened, and known to be any before a model is loaded.

Knows what is refused. Does not know how sources are read (``tasks/batch``).
"""

from typing import TYPE_CHECKING

from vlfit.errors import PictureNotFound, UsageError

if TYPE_CHECKING:
    from vlfit.tasks.batch.item import Source
    from vlfit.tasks.batch.job import Job
    from vlfit.tasks.batch.sources import SourceOptions


def is_read_once(job: "Job") -> bool:
    """Whether pictures are named on standard input, which can be gone through a single time."""
    return "-" in job.sources


def source_of(job: "Job", options: "SourceOptions", *, listed_here: bool) -> "Source":
    """The pictures of ``job``. ``listed_here``: by this process, so that a list from a pipe can be begun.

    Raises ``PictureNotFound`` for none: a wrong folder or an empty list is known before a model is loaded.
    ``UsageError`` for words that make no sense, and for pictures that no sidecar can stand by.
    """
    from vlfit.tasks.batch.shard import ShardSource, read_shard
    from vlfit.tasks.batch.sources import BegunSource, open_sources

    source = open_sources(job.sources, options)
    if job.shard is not None:
        source = ShardSource(source, *read_shard(job.shard))
    if not is_read_once(job):
        first = next(iter(source), None)
    elif listed_here:
        source = begun = BegunSource(source)
        first = begun.first
    else:
        return source  # refused, in words of its own
    if first is None:
        part = f"part {job.shard} of " if job.shard is not None else ""
        named = ("standard input" if name == "-" else name for name in job.sources[:5])
        raise PictureNotFound(
            f"there are no pictures in {part}{', '.join(named)}",
            " ".join(source.notes()) or "is it the right one?",
        )
    if job.sidecars and first.path is None:
        raise UsageError(
            f"--sidecar writes beside files, and {first.key} is none of its own", "leave --sidecar out"
        )
    return source
