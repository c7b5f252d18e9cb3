"""Lanes of the decode queue: each slot wakes the picture whose turn it is, and no other has to."""

import threading
from collections.abc import Iterator

import pytest

from vlfit.images import decode_queue
from vlfit.images.cancellation import Cancelled, cancel_when
from vlfit.images.decode_queue import DecodeQueue, DecodeSlot, Verdict


@pytest.fixture(autouse=True)
def nobody_looks_by_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken waits for ever."""
    monkeypatch.setattr(decode_queue, "TICK_SECONDS", 3600.0)


class Waiter(threading.Thread):
    """Waits for a slot, and notes its ``name`` in ``log`` when it has one."""

    def __init__(self, queue: DecodeQueue, name: str, log: list[str], *, slow: bool = False) -> None:
        super().__init__(name=name, daemon=True)
        self.queue, self.log, self.slow = queue, log, slow
        self.gone = threading.Event()
        self.slots: list[DecodeSlot] = []
        before = queue.num_waiting
        self.start()
        while self.is_alive() and queue.num_waiting == before:
            self.gone.wait(0.001)

    def run(self) -> None:
        try:
            with cancel_when(self.gone.is_set):
                self.slots.append(self.queue.acquire(slow=self.slow))
            self.log.append(self.name)
        except Cancelled:
            self.log.append(f"not {self.name}")


def ended(waiters: list[Waiter]) -> Iterator[bool]:
    for each in waiters:
        each.join(60)
        yield not each.is_alive()


def test_pictures_get_slots_in_order_of_arrival() -> None:
    queue = DecodeQueue(2)
    log: list[str] = []
    slots = [queue.acquire(), queue.acquire()]
    assert queue.try_acquire() is None
    waiters = [Waiter(queue, str(number), log) for number in range(6)]
    for number, waiter in enumerate(waiters):
        slots.pop(0).release()
        waiter.join(60)
        assert log == [str(each) for each in range(number + 1)]
        slots += waiter.slots
    assert all(ended(waiters))
    assert (queue.num_running, queue.num_waiting) == (2, 0)


def test_slots_that_are_free_at_once_wake_as_many() -> None:
    queue = DecodeQueue(3)
    log: list[str] = []
    slots = [queue.acquire() for _ in range(3)]
    waiters = [Waiter(queue, str(number), log) for number in range(3)]
    for slot in slots:
        slot.release()
    assert all(ended(waiters))
    assert sorted(log) == ["0", "1", "2"]


def test_a_free_slot_is_not_taken_before_those_that_wait() -> None:
    queue = DecodeQueue(1)
    log: list[str] = []
    slot = queue.acquire()
    first, second = (Waiter(queue, name, log) for name in "ab")
    slot.release()
    first.join(60)
    assert queue.try_acquire() is None  # the second waits
    first.slots[0].release()
    second.join(60)
    assert log == ["a", "b"]


def test_a_cancelled_picture_passes_its_turn_on() -> None:
    queue = DecodeQueue(1)
    log: list[str] = []
    slot = queue.acquire()
    first, second = (Waiter(queue, name, log) for name in "ab")
    first.gone.set()
    slot.release()  # wakes the first, which finds that it is cancelled
    assert all(ended([first, second]))
    assert log == ["not a", "b"]


def test_a_slow_picture_makes_room_for_a_new_one_and_a_slow_one_gets_its_place() -> None:
    queue = DecodeQueue(1, slow_seconds=1.0)
    log: list[str] = []
    slots = [queue.acquire()]
    new = Waiter(queue, "new", log)
    assert slots[0].check(2.0, yields=True) is Verdict.BECOMES_SLOW
    new.join(60)
    assert new.slots[0].check(2.0, yields=True) is Verdict.BECOMES_SLOW
    slow = Waiter(queue, "slow", log, slow=True)
    slots[0].release()
    slow.join(60)
    assert log == ["new", "slow"]
