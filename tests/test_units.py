"""Sizes as people type them, and as they are printed."""

import pytest

from vlfit.errors import UsageError
from vlfit.units import (
    GIB,
    KIB,
    MIB,
    counted,
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8 GB", 8 * 10**9),
        ("8GiB", 8 * GIB),
        ("8151MiB", 8151 * MIB),
        ("8151 mib", 8151 * MIB),
        ("7.5GiB", 15 * GIB // 2),
        (" 951MiB ", 951 * MIB),
        ("+951MiB", 951 * MIB),
        (".5 KiB", 512),
        ("1.GiB", GIB),
        ("8G", 8 * GIB),
        ("512k", 512 * KIB),
        ("2 TB", 2 * 10**12),
        ("997195776B", 951 * MIB),
        ("0", 0),
        ("-0", 0),
        ("0 MiB", 0),
        ("1.1 B", 1),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-1GiB", "cannot be negative"),
        ("- 1 GiB", "cannot be negative"),
        ("951", "'951' has no unit"),
        ("8 GBi", "unknown unit 'GBi'"),
        ("8 gigs", "unknown unit 'gigs'"),
        ("8 MIP", "unknown unit 'MIP'"),
        ("7,5 GiB", "is not a size"),
        ("GiB", "is not a size"),
        ("", "is not a size"),
        ("1e3 MiB", "is not a size"),
        ("nan GiB", "is not a size"),
        ("8 GiB 5 MiB", "is not a size"),
        ("9999999 TiB", "larger than any memory"),
        ("9" * 400 + "B", "larger than any memory"),
    ],
)
def test_what_is_no_size(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_bytes(text, "--desktop")
    assert words in raised.value.message
    assert raised.value.message.startswith("--desktop: ")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), (" 5 min ", 300), ("1.5h", 5400), ("1d", 86400), (".5S", 0.5), ("2 sec", 2)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("300", "has no unit"),
        ("", "is not a duration"),
        ("soon", "is not a duration"),
        ("-5m", "is not a duration"),
        ("5m 30s", "is not a duration"),
        ("5 weeks", "unknown unit 'weeks'"),
        ("0s", "no time to wait"),
        ("9" * 400 + "h", "no time to wait"),
    ],
)
def test_what_is_no_duration(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_seconds(text, "--idle-sleep")
    assert words in raised.value.message
    assert raised.value.message.startswith("--idle-sleep: ")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4.0 KiB"),
        (951 * MIB, "951 MiB"),
        (5 * GIB, "5.00 GiB"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_bytes_are_printed(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_bandwidth_and_seconds_are_printed() -> None:
    assert format_bandwidth(448 * 10**9) == "448 GB/s"
    assert format_bandwidth(31_507_692_308) == "31.5 GB/s"
    assert [format_seconds(each) for each in (0.012, 3.4, 125)] == ["12 ms", "3.4 s", "2 min 05 s"]


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (1, ("token",), "1 token"),
        (0, ("token",), "0 tokens"),
        (2048, ("token",), "2,048 tokens"),
        (1, ("process that takes", "processes that take"), "1 process that takes"),
        (2, ("process that takes", "processes that take"), "2 processes that take"),
    ],
)
def test_nouns_follow_their_count(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said
