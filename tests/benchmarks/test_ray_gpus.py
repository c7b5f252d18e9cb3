"""``benchmarks.ray_gpus``: speeds and checks from the records of a run."""

import json
from pathlib import Path

import pytest

from benchmarks.ray_gpus import KILLED, ONE, RAY_ALL, RAY_ONE, Row, WatchedRun, WorkerLog, check, table


def watched_run(killed: float | None = None) -> WatchedRun:
    """Two workers that begin after 10 and 12 s; 32 records a second from then on."""
    log = WorkerLog()
    log.workers = [(10.0, 1), (12.0, 2)]
    counts: list[tuple[float, tuple[int, ...]]] = [
        (when, (max(0, 32 * (when - 9)),)) for when in range(4, 40)
    ]
    return WatchedRun(start=4.0, log=log, workers=2, counts=counts, killed=killed, end=40.0)


def test_speed_is_that_of_the_middle() -> None:
    run = watched_run()
    assert run.speed(960) == pytest.approx(32)
    run.counts = [(when, counts) for when, counts in run.counts if when > 30]
    run.log.workers.append((31.0, 3))
    row = run.row(ONE, 1, 960)
    assert (row.first_s, row.wall_s, row.back_s) == (27.0, 36.0, None)
    assert str(run.speed(100)) == "nan"  # all of it was over before anything was seen


def test_a_killed_worker_is_back_when_its_successor_has_given_something() -> None:
    run = watched_run(killed=15.0)
    assert run.row(KILLED, 2, 960).back_s is None
    run.log.add("worker 3 has begun: machine:77\n")
    run.log.workers[2] = (24.5, 77)
    assert run.row(KILLED, 2, 960).back_s == 9.5


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
    with pytest.raises(SystemExit, match=r"^\D*2\D+3\D+1\D"):
        check([output], 3)
