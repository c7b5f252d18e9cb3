"""Runs from a source into an output: after a stop, a kill or a full disk, the next one continues."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripted_backend import png
from tests.tasks.batch.beside import ConcurrentBackend, Items, item
from vlfit.api.sampling_params import SamplingParams
from vlfit.client import VisionModel
from vlfit.errors import CannotWrite, EngineStopped, ServerUnreachable
from vlfit.tasks.batch.executor import BatchExecutor, ExecutorOptions, Outcome
from vlfit.tasks.batch.items import Item, Record
from vlfit.tasks.batch.job import Job, PictureTask, Wish
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.runner import BatchProgress, BatchRunner, Tally, estimate_batch

ROOT = Path(__file__).parents[3]


def job(tmp_path: Path) -> Job:
    return Job(Wish.caption(), SamplingParams(), ("p",), tmp_path / "out.jsonl")


def numbered(count: int) -> Items:
    return Items([item(f"{number:04}", png(8 + number % 32, 8 + number // 32)) for number in range(count)])


def run(
    tmp_path: Path,
    backend: ConcurrentBackend,
    source: Items,
    *,
    limit: int | None = None,
    progress: BatchProgress | None = None,
    ordered: bool = False,
    tries: int = 6,
) -> Tally:
    """One run, as ``vlfit batch`` does it."""
    output = Output(job(tmp_path))
    try:
        output.begin(backend.model)
        executor = BatchExecutor(
            PictureTask.from_job(job(tmp_path)), backend, ExecutorOptions(4, tries=tries)
        )
        return BatchRunner(executor, source, output, progress=progress, limit=limit, ordered=ordered).run()
    finally:
        output.close()


def keys_of(tmp_path: Path, name: str = "out.jsonl") -> list[str]:
    return [json.loads(line)["key"] for line in (tmp_path / name).read_text().splitlines()]


def test_a_second_run_does_what_is_left(tmp_path: Path) -> None:
    source = numbered(20)
    source.items.append(item("gone", missing=True))
    tally = run(tmp_path, ConcurrentBackend(), source, limit=7)
    assert (tally.done, tally.failed) == (7, 0)
    backend = ConcurrentBackend()
    tally = run(tmp_path, backend, source)
    assert (tally.done, tally.failed, tally.skipped, len(backend.started)) == (13, 1, 7, 13)
    assert sorted(keys_of(tmp_path)) == [f"{number:04}" for number in range(20)]
    tally = run(tmp_path, ConcurrentBackend(), source)
    assert (tally.done, tally.failed, tally.skipped) == (0, 0, 21)
    assert (tally.completion_tokens, tally.prompt_tokens) == (0, 0)


def test_records_in_the_order_of_the_source(tmp_path: Path) -> None:
    run(tmp_path, ConcurrentBackend(), numbered(50), ordered=True)
    assert keys_of(tmp_path) == [f"{number:04}" for number in range(50)]


def test_stopped_it_keeps_what_has_ended_and_drops_what_runs(tmp_path: Path) -> None:
    backend = ConcurrentBackend(hold=True)
    output = Output(job(tmp_path))
    output.begin(backend.model)

    class Stopper(BatchProgress):
        def settled(self, outcome: Outcome) -> None:
            super().settled(outcome)
            if self.tally.done == 1:
                backend.release()  # one more has ended when the stop comes
                runner.stop()

        def tick(self) -> None:
            super().tick()
            if not self.tally.done and backend._held:
                backend.release()

    runner = BatchRunner(
        BatchExecutor(PictureTask.from_job(job(tmp_path)), backend, ExecutorOptions(4)),
        numbered(20),
        output,
        progress=Stopper(),
    )
    tally = runner.run()
    output.close()
    assert (tally.stopped, tally.done) == (True, 2)
    assert len(keys_of(tmp_path)) == 2
    assert backend.cancelled >= 2


def test_who_waits_for_a_server_to_come_back_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlfit.tasks.batch.failures.FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("vlfit.tasks.batch.runner.STALL_SECONDS", 0.0)
    monkeypatch.setattr("vlfit.tasks.batch.runner.TICK_SECONDS", 0.001)
    notes: list[str] = []

    def say(data: bytes, prompt: str) -> str | Exception:
        return "fine" if notes else ServerUnreachable("no server answers")

    progress = BatchProgress()
    monkeypatch.setattr(progress, "note", notes.append)
    tally = run(tmp_path, ConcurrentBackend(say=say), numbered(30), progress=progress, tries=10_000)
    assert (tally.done, tally.failed) == (30, 0)
    [note] = set(notes)
    assert note.endswith(": no server answers")


def test_what_ended_before_a_failure_of_all_is_kept(tmp_path: Path) -> None:
    said: list[bytes] = []

    def say(data: bytes, prompt: str) -> str | Exception:
        said.append(data)
        return "fine" if len(said) <= 10 else EngineStopped("the engine is gone")

    with pytest.raises(EngineStopped):
        run(tmp_path, ConcurrentBackend(say=say), numbered(100))
    assert len(keys_of(tmp_path)) == 10
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()
    run(tmp_path, ConcurrentBackend(), numbered(100))
    assert sorted(keys_of(tmp_path)) == [f"{number:04}" for number in range(100)]


def test_a_full_disk_stops_the_run_and_leaves_the_output_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Output, item: Item, record: Record) -> None:
        if len(keys_of(tmp_path)) == 5:
            raise CannotWrite("cannot write out.jsonl: No space left on device")
        whole(self, item, record)

    whole = Output.write
    monkeypatch.setattr(Output, "write", write)
    with pytest.raises(CannotWrite):
        run(tmp_path, ConcurrentBackend(), numbered(20))
    monkeypatch.undo()
    assert len(keys_of(tmp_path)) == 5
    run(tmp_path, ConcurrentBackend(), numbered(20))
    assert len(set(keys_of(tmp_path))) == len(keys_of(tmp_path)) == 20


def test_from_python(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(20, 16))
    (tmp_path / "b.png").write_text("no picture")
    backend = ConcurrentBackend()
    model, output = VisionModel(backend), tmp_path / "cups.jsonl"
    tally = model.batch(tmp_path, output, Wish.ask("A cup?"), max_tokens=5, limit=9)
    assert (tally.done, tally.failed, keys_of(tmp_path, "cups.jsonl")) == (1, 1, ["a.png"])
    (tmp_path / "b.png").write_bytes(png(21, 16))
    tally = model.batch([tmp_path], str(output), Wish.ask("A cup?"), max_tokens=5, retry_failed=True)
    assert (tally.done, tally.skipped, len(backend.started)) == (1, 1, 2)


KILLED = """
import sys
from pathlib import Path
from tests.tasks.batch.beside import ConcurrentBackend
from tests.tasks.batch.test_runner import numbered, run
def say(data, prompt):
    return "words " * 100
run(Path(sys.argv[1]), ConcurrentBackend(say=say), numbered(240))
"""


def test_killed_at_any_time_nothing_is_lost_and_nothing_is_done_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    output = tmp_path / "out.jsonl"
    for share in (50, 120):
        process = subprocess.Popen(command, cwd=ROOT)
        end = time.monotonic() + 60
        while not output.exists() or output.stat().st_size < share * 850:
            assert process.poll() is None
            assert time.monotonic() < end
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    before = len(output.read_bytes().split(b"\n")) - 1
    assert 100 <= before < 240
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert sorted(keys_of(tmp_path)) == [f"{number:04}" for number in range(240)]


def test_a_tally_reckons_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tally = Tally(total=1000, began=now[0])
    assert tally.seconds_left(0) is None
    tally.mark()
    for _ in range(100):
        tally.take(Outcome(item("a"), {"usage": {"prompt_tokens": 5, "completion_tokens": 4}}))
    tally.take(Outcome(item("b"), {"same_as": "a", "usage": {"prompt_tokens": 5, "completion_tokens": 4}}))
    now[0] = 120.0
    tally.mark()
    assert tally.speeds() == (101 / 20, 20.0)
    assert tally.seconds_left(before=495) == pytest.approx(404 / 5.05)
    now[0] = 200.0  # a minute in which nothing came
    tally.mark()
    assert tally.speeds() == (0.0, 0.0)
    assert tally.seconds_left(495) is None


def test_a_dry_run_writes_nothing_and_reckons(tmp_path: Path) -> None:
    run(tmp_path, ConcurrentBackend(), numbered(20), limit=5)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    output = Output(job(tmp_path))
    executor = BatchExecutor(PictureTask.from_job(job(tmp_path)), ConcurrentBackend(), ExecutorOptions(4))
    facts = estimate_batch(executor, numbered(20), output, 20)
    output.close()
    assert (facts["pictures"], facts["settled_before"], facts["tried"], facts["failed"]) == (20, 5, 8, 0)
    line = max(map(len, (tmp_path / "out.jsonl").read_bytes().splitlines()))
    assert facts["bytes_for_all"] == pytest.approx(15 * line, rel=0.1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
