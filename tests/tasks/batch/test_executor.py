"""The executor keeps a backend busy, retries transient failures, and stops for errors of all pictures."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.scripted_backend import png
from tests.tasks.batch.beside import ConcurrentBackend, Ready, item
from vlfit.api.outputs import Listener
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Ticket
from vlfit.errors import (
    DoesNotFit,
    EngineStopped,
    OutOfMemory,
    PictureError,
    QueueFull,
    RemoteError,
    ServerStopping,
    ServerUnreachable,
    VlfitError,
)
from vlfit.tasks.batch import failures
from vlfit.tasks.batch.executor import BatchExecutor, ExecutorOptions, Outcome, OutcomeStream
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.job import PictureTask, Wish

TASK = PictureTask(Wish.caption(), SamplingParams())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FIRST_DELAY_S", 0.001)


def executor(backend: ConcurrentBackend, at_once: int = 4, tries: int = 3) -> BatchExecutor:
    return BatchExecutor(TASK, backend, ExecutorOptions(at_once, readers=2, tries=tries))


def numbered(count: int, start: int = 0) -> list[Item]:
    """Items of pictures that all differ."""
    return [
        item(f"{number}", png(16 + number % 100, 16 + number // 100))
        for number in range(start, start + count)
    ]


def keys(outcomes: list[Outcome]) -> list[str]:
    return [outcome.item.key for outcome in outcomes]


def all_outcomes(run: OutcomeStream) -> list[Outcome]:
    """The rest of ``run``. None may come at last, where the source ends after the last outcome."""
    outcomes = []
    while not run.finished:
        outcome = run.next(60.0)
        assert outcome is not None or run.finished
        outcomes += [] if outcome is None else [outcome]
    return outcomes


def until(found: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_every_picture_comes_out_once_and_no_more_run_than_may() -> None:
    backend = ConcurrentBackend()
    outcomes = list(executor(backend).outcomes([*numbered(60), item("gone", missing=True)]))
    assert sorted(keys(outcomes)) == sorted([*map(str, range(60)), "gone"])
    assert backend.most <= 4
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    assert keys(failed) == ["gone"]
    assert isinstance(failed[0].error, PictureError)
    record = next(outcome.record for outcome in outcomes if outcome.item.key == "3")
    assert record is not None
    assert (record["images"][0]["width"], record["usage"]["total_tokens"]) == (19, 13)


def test_the_backend_is_kept_full_and_no_more_is_read_than_fits() -> None:
    backend = ConcurrentBackend(hold=True)
    read: list[str] = []

    def items() -> Iterator[Item]:
        for each in numbered(40):
            read.append(each.key)
            yield each

    run = executor(backend).stream(items())
    until(lambda: len(backend.started) == 4)
    time.sleep(0.02)
    assert len(backend.started) == 4
    assert len(read) <= 6  # four run, two wait prepared in the readers' hands
    for _ in range(40):
        until(lambda: backend._held)
        backend.release()
        assert run.next(60.0) is not None
    assert run.next(60.0) is None
    assert run.finished
    run.close()


def test_pictures_of_the_same_bytes_are_asked_about_once() -> None:
    backend = ConcurrentBackend(hold=True)
    same, other = png(20, 20), png(30, 30)
    shared = executor(backend)
    run = shared.stream([item("a", same), item("b", same), item("c", other), item("d", same)])
    until(lambda: len(backend.started) == 2)
    backend.release()
    backend.release()
    outcomes = [run.next(60.0) for _ in range(4)]
    records = {outcome.item.key: outcome.record for outcome in outcomes if outcome and outcome.record}
    leader = next(key for key in "abd" if "same_as" not in records[key])
    assert {key: record.get("same_as") for key, record in records.items()} == {
        **dict.fromkeys("abd", leader),
        leader: None,
        "c": None,
    }
    assert records["d"]["key"] == records["d"]["picture"] == "d"
    late = list(shared.outcomes([item("late", same)]))
    assert late[0].record is not None
    assert late[0].record["same_as"] == leader
    assert len(backend.started) == 2


def test_who_waits_for_the_same_bytes_fails_with_them() -> None:
    backend = ConcurrentBackend(say=lambda data, prompt: DoesNotFit("too large", ""))
    same = png()
    outcomes = list(executor(backend).outcomes([item(key, same) for key in "abc"]))
    assert [type(outcome.error) for outcome in outcomes] == [DoesNotFit] * 3


@pytest.mark.parametrize(
    "error",
    [
        *(QueueFull("full", retry_after=0), RemoteError("500", status=503), OutOfMemory("full")),
        *(ServerUnreachable("gone"), ServerStopping("until it is back")),
    ],
)
def test_a_failure_that_may_pass_is_tried_again(error: VlfitError) -> None:
    tries: list[bytes] = []

    def say(data: bytes, prompt: str) -> str | Exception:
        tries.append(data)
        return error if tries.count(data) < 3 else "at last"

    outcomes = list(executor(ConcurrentBackend(say=say)).outcomes(numbered(5)))
    assert [outcome.tries for outcome in outcomes] == [3] * 5
    assert len(tries) == 15


def test_a_run_knows_since_when_nothing_succeeds() -> None:
    said: list[str | Exception] = [ServerUnreachable("gone"), RemoteError("503", status=503), "back"]
    backend = ConcurrentBackend(say=lambda data, prompt: said.pop(0), hold=True)
    run = executor(backend).stream(numbered(1))
    found = []
    for _ in range(3):
        until(lambda: backend._held)
        backend.release()
        outcome = run.next(0.01)
        found.append(run.stalled)
    assert outcome is not None
    assert found[2] is None
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][0] == found[1][0], "since the first of them"
    assert isinstance(found[1][1], RemoteError)
    run.close()


def test_a_refusal_is_not_tried_again() -> None:
    wrong = png(50, 50)

    def say(data: bytes, prompt: str) -> str | Exception:
        return RemoteError("400: no", status=400) if data == wrong else "fine"

    outcomes = list(executor(ConcurrentBackend(say=say)).outcomes([item("w", wrong), *numbered(5)]))
    assert [(outcome.item.key, outcome.tries) for outcome in outcomes if outcome.error] == [("w", 1)]


@pytest.mark.parametrize("error", [EngineStopped("gone"), ServerUnreachable("gone"), ServerStopping("gone")])
def test_a_failure_of_all_stops_at_once_and_lists_nothing(error: VlfitError) -> None:
    backend = ConcurrentBackend(say=lambda data, prompt: error)
    seen: list[Outcome] = []
    with pytest.raises(type(error)):
        seen.extend(executor(backend, tries=2).outcomes(numbered(500)))
    assert seen == []
    assert len(backend.started) < 250


def test_when_nothing_fits_it_is_not_the_pictures() -> None:
    backend = ConcurrentBackend(say=lambda data, prompt: DoesNotFit("9000 > 4096", ""))
    outcomes = executor(backend).outcomes(numbered(500))
    with pytest.raises(VlfitError, match=r"\b16\b.*\b9000 > 4096\b") as failed:
        list(outcomes)
    assert "--keep-going" in failed.value.hint
    assert len(backend.started) < 100


def test_when_nothing_is_there_it_is_not_the_pictures() -> None:
    gone = [item(f"{number}", missing=True) for number in range(50)]
    seen: list[Outcome] = []
    with pytest.raises(VlfitError, match=r"in a row.*gone\.png"):
        seen.extend(executor(ConcurrentBackend()).outcomes(gone))
    assert seen == []
    patient = BatchExecutor(TASK, ConcurrentBackend(), ExecutorOptions(4, keep_going=True))
    assert len([outcome for outcome in patient.outcomes(gone) if outcome.error]) == 50


def test_some_that_do_not_fit_are_listed() -> None:
    def say(data: bytes, prompt: str) -> str | Exception:
        return DoesNotFit("over the context", "") if len(data) % 2 else "fine"

    outcomes = list(executor(ConcurrentBackend(say=say)).outcomes(numbered(100)))
    assert len(outcomes) == 100
    assert {type(outcome.error) for outcome in outcomes} == {type(None), DoesNotFit}


def test_a_fault_of_a_library_costs_one_picture() -> None:
    strange = png(50, 50)

    def say(data: bytes, prompt: str) -> str | Exception:
        return ZeroDivisionError("in the decoder") if data == strange else "fine"

    outcomes = list(executor(ConcurrentBackend(say=say)).outcomes([item("s", strange), *numbered(5)]))
    assert [type(outcome.error) for outcome in outcomes if outcome.error] == [ZeroDivisionError]


def test_a_source_that_breaks_is_told() -> None:
    def items() -> Iterator[Item]:
        yield from numbered(3)
        raise ZeroDivisionError("of the source")

    with pytest.raises(ZeroDivisionError):
        list(executor(ConcurrentBackend()).outcomes(items()))


def test_in_order_whatever_ends_first() -> None:
    backend = ConcurrentBackend(hold=True)
    run = executor(backend).stream([*numbered(6), item("gone", missing=True)], ordered=True)
    for _ in range(6):
        until(lambda: backend._held)
        backend.release(last=True)
    assert keys(all_outcomes(run)) == [*map(str, range(6)), "gone"]
    run.close()


def test_in_order_with_failures_that_nobody_knows_whose_they_are() -> None:
    def say(data: bytes, prompt: str) -> str | Exception:
        return DoesNotFit("over the context", "") if len(data) % 2 else "fine"

    run = executor(ConcurrentBackend(say=say)).stream(
        [*numbered(40), *(item(f"gone{number}", b"text") for number in range(500))], ordered=True
    )
    assert keys(all_outcomes(run)) == [*map(str, range(40)), *(f"gone{number}" for number in range(500))]
    run.close()


def test_a_run_that_is_closed_lets_go_of_its_places_and_of_who_waits_for_it() -> None:
    backend = ConcurrentBackend(hold=True)
    shared = executor(backend)
    same = png(20, 20)
    first = shared.stream([item("a", same), *numbered(3)])
    until(lambda: len(backend.started) == 4)
    second = shared.stream([item("b", same)])
    time.sleep(0.02)
    first.close()
    assert backend.cancelled == 4
    until(lambda: len(backend.started) == 5)
    backend.release(last=True)
    outcome = second.next(60.0)
    assert outcome is not None
    assert outcome.record is not None
    assert "same_as" not in outcome.record
    second.close()


def test_two_runs_share_the_places() -> None:
    backend = ConcurrentBackend()
    shared = executor(backend)
    found: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda start=start: found.extend(shared.outcomes(numbered(30, start))))
        for start in (0, 30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(int, keys(found))) == list(range(60))
    assert backend.most <= 4


def test_a_start_that_fails_after_the_answer_is_not_told_twice() -> None:
    class Late(ConcurrentBackend):
        def start(self, prepared: object, sampling: SamplingParams, listener: Listener) -> Ticket:
            assert isinstance(prepared, Ready)
            self._answer(prepared, listener)
            raise ZeroDivisionError("after the answer")

    outcomes = list(executor(Late()).outcomes(numbered(20)))
    assert sorted(map(int, keys(outcomes))) == list(range(20))
    assert [outcome.error for outcome in outcomes] == [None] * 20
