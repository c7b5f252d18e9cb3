"""What ``benchmarks.ray_gpus`` makes of what it has seen."""

import json
from pathlib import Path

import pytest

from benchmarks.ray_gpus import KILLED, ONE, RAY_ALL, RAY_ONE, Heard, Row, Seen, check, table


def seen(killed: float | None = None) -> Seen:
    """Two workers, heard of after 10 and 12 s, of which 32 records come every second; nothing before."""
    heard = Heard()
    heard.workers = [(10.0, 1), (12.0, 2)]
    counts: list[tuple[float, tuple[int, ...]]] = [
        (when, (max(0, 32 * (when - 9)),)) for when in range(4, 40)
    ]
    return Seen(start=4.0, heard=heard, workers=2, counts=counts, killed=killed, end=40.0)


def test_speed_is_that_of_the_middle() -> None:
    one = seen()
    assert one.speed(960) == pytest.approx(32)
    one.counts = [(when, counts) for when, counts in one.counts if when > 30]
    one.heard.workers.append((31.0, 3))
    row = one.row(ONE, 1, 960)
    assert (row.first_s, row.wall_s, row.back_s) == (27.0, 36.0, None)
    assert str(one.speed(100)) == "nan"  # all of it was over before anything was seen


def test_a_killed_worker_is_back_when_its_successor_has_given_something() -> None:
    one = seen(killed=15.0)
    assert one.row(KILLED, 2, 960).back_s is None
    one.heard.hear("worker 3 has begun: machine:77\n")
    one.heard.workers[2] = (24.5, 77)
    assert one.row(KILLED, 2, 960).back_s == 9.5


def test_each_way_stands_beside_one_gpu_of_its_own_kind() -> None:
    ways = (
        (ONE, 1, 40.0),
        (RAY_ONE, 1, 36.0),
        (RAY_ALL.format(2), 2, 72.0),
        ("without Ray, 2 parts", 2, 78.0),
    )
    rows = table([Row(way, gpus, 1000, speed, 10.0, 40.0) for way, gpus, speed in ways])
    assert [row[4] for row in rows[1:]] == ["1.00", "1.00", "2.00", "1.95"]


def test_a_picture_that_is_missing_or_there_twice_ends_it(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("".join(json.dumps({"key": key}) + "\n" for key in "abb"))
    with pytest.raises(SystemExit, match="2 of 3 pictures are done, 1 of them twice"):
        check([output], 3)
