"""Which picture gets a worker next: two lanes, so that slow pictures do not hold up others.

New pictures start in order of arrival, ``num_workers`` at once. One that turns out slow moves to a slot of
the slow lane, which makes room for a new one. If no such slot is free and new pictures wait, it is stopped,
and started again when its turn in the slow lane has come. Nothing is stopped there, so everything ends.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_memory import MAX_SLOW
from vlfit.images.decode_wire import TICK_SECONDS

SLOW_SECONDS = 1.0  # a picture that takes longer is slow; for files of a media pool, see there
# While others wait, a new picture is slow after half of that, or less: the last in the queue shall get a
# worker within about ``_QUEUE_SECONDS``, although all before it are slow.
_QUEUE_SECONDS = 8.0
_MIN_TURN_SECONDS = 0.1


class Verdict(Enum):
    """What ``DecodeSlot.check`` decides about a running picture."""

    CONTINUE = auto()
    BECOMES_SLOW = auto()  # and continues, in a slot of the slow lane
    STOP = auto()  # end its worker, release the slot, and start over with ``acquire(slow=True)``


class DecodeSlot:
    """The right to run one worker for one picture, from ``DecodeQueue.acquire`` until ``release``.

    ``is_slow``: in the slow lane. ``is_stopping``: ``check`` has returned ``STOP``.
    """

    def __init__(self, queue: "DecodeQueue", is_slow: bool) -> None:
        self._queue = queue
        self.is_slow = is_slow
        self.is_stopping = False

    def check(self, seconds: float, *, yields: bool) -> Verdict:
        """Decide about a picture that has run for ``seconds``; sets ``is_slow`` or ``is_stopping``.

        ``yields``: the picture may be stopped; False: never ``STOP``.
        """
        return self._queue.check(self, seconds, yields)

    def release(self) -> None:
        """Give the slot back, once. The worker must be free or ended."""
        self._queue.release(self)


class DecodeQueue:
    """Slots for ``num_workers`` pictures at once, and up to ``MAX_SLOW`` more while as many are slow.

    A picture is slow after ``slow_seconds``, or after half of that or less while others wait.

    ``acquire`` a slot, run a worker, and call the slot's ``check`` every ``TICK_SECONDS`` or so: it may move
    the picture to the slow lane, or say ``STOP``. ``release`` each slot once. Thread-safe.
    """

    def __init__(self, num_workers: int, slow_seconds: float = SLOW_SECONDS) -> None:
        self.num_workers = num_workers
        self._slow_seconds = slow_seconds
        self._num_slow = max(MAX_SLOW, num_workers // 2)
        self._lock = threading.Lock()
        self._running: list[DecodeSlot] = []
        self._new: list[_Ticket] = []
        self._slow: list[_Ticket] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._new) + len(self._slow)

    @property
    def longest_wait(self) -> float:
        """Seconds that the first new picture in the queue has waited; 0 if there is none."""
        with self._lock:
            return time.monotonic() - self._new[0].since if self._new else 0.0

    def try_acquire(self, *, slow: bool = False) -> DecodeSlot | None:
        """``acquire`` without waiting; None if there is no slot, or others wait for one."""
        with self._lock:
            return None if self._must_wait(slow) else self._new_slot(slow)

    def acquire(self, *, slow: bool = False, check: Callable[[], None] = check_cancelled) -> DecodeSlot:
        """Wait for a slot, in order of arrival, and return it. The caller must ``release`` it.

        ``slow``: in the slow lane, for a picture that was stopped before; False: in that of new pictures.
        ``check``: called while it waits; raises to end the wait.
        """
        with self._lock:
            if self._must_wait(slow):
                self._wait(slow, check)
            slot = self._new_slot(slow)
            self._wake_next()
            return slot

    def release(self, slot: DecodeSlot) -> None:
        """Implements ``DecodeSlot.release``."""
        with self._lock:
            self._running.remove(slot)
            self._wake_next()

    def check(self, slot: DecodeSlot, seconds: float, yields: bool) -> Verdict:
        """Implements ``DecodeSlot.check``."""
        with self._lock:
            if slot.is_slow or seconds <= (self._turn_seconds() if yields else self._slow_seconds):
                return Verdict.CONTINUE
            # Those that wait in the slow lane come first, or they might wait for ever.
            if not yields or (self._num_running_slow() < self._num_slow and not self._slow):
                slot.is_slow = True
                self._wake_next()
                return Verdict.BECOMES_SLOW
            num_stopping = sum(each.is_stopping for each in self._running)
            if self._has_slot(slow=False) or len(self._new) <= num_stopping:
                return Verdict.CONTINUE
            slot.is_stopping = True
            return Verdict.STOP

    def _must_wait(self, slow: bool) -> bool:
        return bool(self._slow if slow else self._new) or not self._has_slot(slow)

    def _new_slot(self, slow: bool) -> DecodeSlot:
        slot = DecodeSlot(self, slow)
        self._running.append(slot)
        return slot

    def _wait(self, slow: bool, check: Callable[[], None]) -> None:
        """Wait to be the first of a lane, and for a slot. Called with the lock."""
        lane = self._slow if slow else self._new
        ticket = _Ticket(self._lock)
        lane.append(ticket)
        try:
            while lane[0] is not ticket or not self._has_slot(slow):
                ticket.turn.wait(TICK_SECONDS)
                check()
        except BaseException:
            lane.remove(ticket)
            self._wake_next()  # the slot may have been for this one
            raise
        lane.remove(ticket)

    def _wake_next(self) -> None:
        """Wake the first of each lane, if there is a slot for it. All others would wake in vain."""
        for lane, slow in ((self._new, False), (self._slow, True)):
            if lane and self._has_slot(slow):
                lane[0].turn.notify()

    def _has_slot(self, slow: bool) -> bool:
        num_slow = self._num_running_slow()
        if slow:
            return num_slow < self._num_slow and len(self._running) < self.num_workers + MAX_SLOW
        return len(self._running) < self.num_workers + min(num_slow, MAX_SLOW)

    def _num_running_slow(self) -> int:
        return sum(each.is_slow for each in self._running)

    def _turn_seconds(self) -> float:
        """How long a new picture may run before it counts as slow: less, the more of them wait."""
        if not self._new:
            return self._slow_seconds
        turn = _QUEUE_SECONDS * self.num_workers / len(self._new)
        return min(max(turn, _MIN_TURN_SECONDS), self._slow_seconds / 2)


class _Ticket:
    """A picture that waits in a lane. ``turn``: notified when it may be its turn."""

    __slots__ = ("since", "turn")

    def __init__(self, lock: threading.Lock) -> None:
        self.since = time.monotonic()
        self.turn = threading.Condition(lock)
