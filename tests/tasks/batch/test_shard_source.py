"""Shards of a source: complete, disjoint, and stable when pictures are added."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from vlfit.errors import UsageError
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.sources import ShardSource, parse_shard


@dataclass(frozen=True)
class Numbers:
    """A source of ``many`` items that must not be read."""

    many: int

    def __iter__(self) -> Iterator[Item]:
        return (Item(f"{number}.jpg", self.read) for number in range(self.many))

    def read(self) -> bytes:
        raise AssertionError("parts are made without reading")

    def count(self) -> int:
        return self.many

    def notes(self) -> list[str]:
        return ["left out 1 file"]


def keys(source: ShardSource) -> list[str]:
    return [item.key for item in source]


def test_parts_are_the_whole_and_share_nothing() -> None:
    parts = [keys(ShardSource(Numbers(1000), index, 7)) for index in range(1, 8)]
    assert sorted(key for part in parts for key in part) == sorted(item.key for item in Numbers(1000))
    # A part is a seventh, but for chance: five standard deviations are 56.
    assert all(87 <= len(part) <= 199 for part in parts)


def test_what_is_added_moves_nothing() -> None:
    before, after = keys(ShardSource(Numbers(500), 2, 3)), keys(ShardSource(Numbers(1000), 2, 3))
    assert after[: len(before)] == before


def test_a_part_tells_its_share_of_the_count() -> None:
    whole, part = ShardSource(Numbers(1000), 1, 1), ShardSource(Numbers(1000), 1, 8)
    assert (whole.count(), whole.count_is_estimate) == (1000, False)
    assert (part.count(), part.count_is_estimate) == (125, True)
    assert abs(len(keys(part)) - 125) < 5 * (1000 * 1 / 8 * 7 / 8) ** 0.5  # chance: five standard deviations
    (note,) = ShardSource(Numbers(10), 1, 2).notes()
    assert re.findall(r"\d+", note) == ["1"]


def test_words_for_parts() -> None:
    assert parse_shard("2/8") == (2, 8)
    for wrong in ("", "2", "2/", "/8", "a/8", "-1/8", "2/8/9", "²/8"):
        with pytest.raises(UsageError, match="--shard"):
            parse_shard(wrong)
    for index, of in ((0, 8), (9, 8), (1, 0)):
        with pytest.raises(UsageError, match=f" {index} of {of}"):
            ShardSource(Numbers(1), index, of)
