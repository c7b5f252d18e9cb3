"""One of N parts of a source, the same in every run: N machines share a job so, with no word between them.

Knows keys and their hashes. Does not know where items come from, or who has the other parts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vlfit.errors import UsageError
from vlfit.tasks.batch.item import Item, Source
from vlfit.tasks.batch.keys import hash_of


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The items of ``source`` whose keys fall into part ``index`` (from 1) of ``of``.

    By the hash of its key alone: pictures that are added later move no other one to another machine.
    """

    source: Source
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise UsageError(
                f"there is no part {self.index} of {self.of}",
                f"parts of {self.of} are 1/{self.of} to {self.of}/{self.of}" if self.of > 0 else _HOW,
            )

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self.source if hash_of(item.key) % self.of == self.index - 1)

    def count(self) -> int | None:
        """About as many as an even share: the hash is as even as chance, so that of a million pictures in
        eight parts each has its 125,000 within a percent. Counting would be another pass of hashing all keys.
        """
        total = self.source.count()
        return None if total is None else round(total / self.of)

    @property
    def about(self) -> bool:
        """Whether ``count`` is a reckoning."""
        return self.of > 1

    def notes(self) -> list[str]:
        """What the whole source has to say."""
        return self.source.notes()


_HOW = "write --shard 1/8 on the first of eight machines, 2/8 on the second, ..."


def read_shard(text: str) -> tuple[int, int]:
    """``2/8`` as (2, 8). Raises ``UsageError`` for anything else."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"--shard is {text!r}", _HOW)
    return int(match[1]), int(match[2])
