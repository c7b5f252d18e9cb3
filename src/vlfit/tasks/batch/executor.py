"""Run one task over many pictures on one backend: read-ahead threads, retries, deduplication.

Reader threads read and prepare pictures, and start their requests as slots become free; a picture with a
transient failure is retried. Memory is bounded by the numbers of slots and readers, however long the source
is.
"""

import heapq
import pickle
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.api.outputs import Answer, Chunk, TokenLogprob, Usage
from vlfit.backends.base import Backend, Prepared, Ticket
from vlfit.errors import EngineStopped
from vlfit.prompt.reasoning import ThinkingSplitter
from vlfit.tasks.batch.failures import (
    DEFAULT_TRIES,
    FailureAction,
    FailureStreak,
    classify,
    is_picture_fault,
    retry_delay,
)
from vlfit.tasks.batch.items import Item, Record, digest_of, display_name
from vlfit.tasks.batch.job import PictureTask

MAX_CACHE_BYTES = 8 * 1024**2  # answers of some 15,000 captions
_ENTRY_BYTES = 200  # Python's overhead for a cached answer
_ITEM_FIELDS = ("key", "picture", "extra")  # fields of a record that are the item's own, not the picture's

_REORDER_WINDOW = 256  # outcomes that may wait for an earlier one when the order is kept
_POLL_SECONDS = 0.5  # how often a reader waiting for a slot checks whether the stream was closed


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Concurrency of a batch, and when to give up.

    ``max_in_flight``: requests sent to the backend and not answered yet, at most. ``readers``: threads that
    read and prepare the next pictures meanwhile. ``tries``: attempts at a picture, if its failures are
    transient. ``keep_going``: do not stop the batch when many pictures in a row fail.
    """

    max_in_flight: int
    readers: int = 2
    tries: int = DEFAULT_TRIES
    keep_going: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item: either ``record`` or ``error`` is set.

    ``tries``: attempts that were made. ``number``: the item's position in the source, from 0.
    """

    item: Item
    record: Record | None = None
    error: Exception | None = None
    tries: int = 1
    number: int = 0


class BatchExecutor:
    """Runs ``task`` on ``backend`` for the items of one or more streams.

    All streams share the ``options.max_in_flight`` slots, and one deduplication cache. Raises ``UsageError``
    if the backend's model cannot do the task.
    """

    def __init__(self, task: PictureTask, backend: Backend, options: ExecutorOptions) -> None:
        task.check(backend)
        self.task = task.fitted(backend)
        self.thinking = backend.thinking(self.task.sampling)
        self.backend = backend
        self.options = options
        self.slots = threading.Semaphore(options.max_in_flight)
        self.dedup = Dedup()

    def stream(self, items: Iterable[Item], *, ordered: bool = False) -> "OutcomeStream":
        """Start reader threads on ``items`` and return their stream, which the caller must close.

        ``ordered``: outcomes come in the order of ``items``; False: in the order in which they finish.
        """
        return OutcomeStream(self, items, ordered=ordered)

    def outcomes(self, items: Iterable[Item]) -> Iterator[Outcome]:
        """Run ``items`` and yield the outcome of each, in the order in which they finish. Thread-safe.

        Raises errors that concern all pictures, ``VlfitError`` after too many failures in a row, and whatever
        iterating ``items`` raises. Requests in flight are then cancelled, as when the iterator is closed
        early.
        """
        stream = self.stream(items)
        try:
            while (outcome := stream.next()) is not None:
                yield outcome
        finally:
            stream.close()


@dataclass(slots=True, eq=False)
class PendingItem:
    """An item of ``stream`` without an outcome yet. ``index``: its position in the source, from 0.

    ``tries``: attempts begun. ``digest``: that of the picture's bytes if this item sends the request for all
    pictures with the same bytes; else None. ``picture``: set while its request runs.
    """

    item: Item
    index: int
    stream: "OutcomeStream"
    tries: int = 0
    digest: bytes | None = None
    picture: ImagePart | VideoPart | None = None


@dataclass(order=True)
class _Retry:
    due_at: float
    index: int
    pending: PendingItem = field(compare=False)


class PendingQueue:
    """Items for the reader threads: retries that are due first, then the source's. Thread-safe.

    ``get`` opens an item; it stays open, also over ``retry``, until ``item_finished``. At most ``max_open``
    items are open at a time. ``max_unemitted``, for streams in source order: ``get`` waits while so many
    items have been taken from the source for which ``outcome_emitted`` was not called yet; None: no such
    limit.
    """

    def __init__(
        self,
        items: Iterable[Item],
        stream: "OutcomeStream",
        max_open: int,
        max_unemitted: int | None = None,
    ) -> None:
        self._items: Iterator[Item] = iter(items)
        self._stream = stream
        self._max_open = max_open
        self._max_unemitted = max_unemitted
        self._emitted = 0
        self._changed = threading.Condition()
        self._retries: list[_Retry] = []
        self._num_taken = 0
        self._num_open = 0
        self._exhausted = False
        self._closed = False
        self.source_error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the source is exhausted and no item is open."""
        return self._exhausted and self._num_open == 0

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def blocked(self) -> bool:
        """Whether no item is open, and ``get`` waits for ``outcome_emitted`` because of ``max_unemitted``."""
        return self._num_open == 0 and not self._exhausted and not self._may_read_next()

    def get(self) -> PendingItem | None:
        """Take the next item. Waits until a retry is due, or the limits allow one more of the source.

        None when all items are finished, after ``close``, or if the source raised (``source_error`` is set
        then).
        """
        with self._changed:
            while not self._closed and not self.finished:
                now = time.monotonic()
                if self._retries and self._retries[0].due_at <= now:
                    return heapq.heappop(self._retries).pending
                if not self._exhausted and self._may_read_next():
                    try:
                        item = next(self._items, None)
                    except Exception as error:  # the rest of the source is unknown
                        self.source_error = error
                        self._closed = True
                        self._changed.notify_all()
                        return None
                    if item is not None:
                        self._num_open += 1
                        self._num_taken += 1
                        return PendingItem(item, self._num_taken - 1, self._stream)
                    self._exhausted = True
                    self._changed.notify_all()
                    continue
                self._changed.wait(self._retries[0].due_at - now if self._retries else None)
            return None

    def retry(self, pending: PendingItem, seconds: float) -> None:
        """Let ``get`` return ``pending`` again once ``seconds`` have passed; it stays open."""
        with self._changed:
            heapq.heappush(self._retries, _Retry(time.monotonic() + seconds, pending.index, pending))
            self._changed.notify()

    def item_finished(self) -> None:
        """Count one open item as finished: it has an outcome and will not be retried."""
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all() if self.finished else self._changed.notify()

    def outcome_emitted(self) -> None:
        """Count one outcome as emitted in source order. Only for queues with ``max_unemitted``."""
        with self._changed:
            self._emitted += 1
            self._changed.notify()

    def _may_read_next(self) -> bool:
        in_window = self._max_unemitted is None or self._num_taken - self._emitted < self._max_unemitted
        return self._num_open < self._max_open and in_window

    def close(self) -> None:
        """Make ``get`` return None from now on, in threads that wait in it too."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Claim(Enum):
    """Who sends the request for a picture's bytes: this item (``OWNED``), or another item (``WAITING``)."""

    OWNED = "owned"
    WAITING = "waiting"


class Dedup:
    """Deduplication: pictures with the same bytes are sent to the model once. Thread-safe.

    ``claim`` a picture's digest. Its owner sends the request, then calls ``resolve`` with the answer, or
    ``abandon``; both return the items that waited for it.

    Answers are cached up to ``max_bytes``, the least recently used evicted first; a picture whose answer was
    evicted is sent again.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting: dict[bytes, list[PendingItem]] = {}
        self._cached_bytes = 0
        self._max_bytes = max_bytes

    def claim(self, digest: bytes, pending: PendingItem) -> "Record | Claim":
        """Return the cached answer for ``digest``, or claim it for ``pending``.

        A record: the cached answer, for ``duplicate_record``. ``Claim.OWNED``: there is none; the caller must
        send the request, then call ``resolve`` or ``abandon``. ``Claim.WAITING``: another item owns the
        digest; ``resolve`` or ``abandon`` of that item will return ``pending``.
        """
        with self._lock:
            cached = self._cache.get(digest)
            if cached is not None:
                self._cache.move_to_end(digest)
                record: Record = pickle.loads(cached)
                return record
            waiting = self._waiting.get(digest)
            if waiting is not None:
                waiting.append(pending)
                return Claim.WAITING
            self._waiting[digest] = []
            return Claim.OWNED

    def resolve(self, digest: bytes, record: Record) -> list[PendingItem]:
        """Cache ``record`` as the answer for ``digest``, and release the digest.

        Returns the items that waited for it. The record's own fields (``key``, ``picture``, ``extra``) are
        not cached; ``same_as`` is set to its key.
        """
        shared = {name: value for name, value in record.items() if name not in _ITEM_FIELDS}
        data = pickle.dumps({**shared, "same_as": record["key"]}, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if digest not in self._cache:
                self._cache[digest] = data
                self._cached_bytes += len(data) + _ENTRY_BYTES
            while self._cached_bytes > self._max_bytes:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1]) + _ENTRY_BYTES
            return self._waiting.pop(digest, [])

    def abandon(self, digest: bytes) -> list[PendingItem]:
        """Release ``digest`` without an answer: the next ``claim`` owns it.

        Returns the items that waited for it, which the caller must retry or fail.
        """
        with self._lock:
            return self._waiting.pop(digest, [])


def duplicate_record(shared: Record, item: Item) -> Record:
    """The record of ``item``, with the answer to another picture with the same bytes.

    ``shared``: that picture's record, or the cached part of it; its ``same_as`` must be that picture's key.
    """
    own: Record = {
        "key": item.key,
        "picture": display_name(item.path) if item.path is not None else item.key,
        "same_as": shared["same_as"],
    }
    record = {**own, **{name: value for name, value in shared.items() if name not in (*own, *_ITEM_FIELDS)}}
    return {**record, "extra": dict(item.extra)} if item.extra else record


_Result = Answer | Record | Exception


class OutcomeStream:
    """The outcomes of ``items``, which run through ``executor``. Creating it starts the reader threads.

    One thread calls ``next`` until ``finished``, or until it raises, then ``close``, which any thread may
    call. ``ordered``: as in ``BatchExecutor.stream``.
    """

    def __init__(self, executor: BatchExecutor, items: Iterable[Item], *, ordered: bool = False) -> None:
        self._executor = executor
        options = executor.options
        # Includes items that wait for a retry, or for another picture's answer: those hold no pixels.
        max_open = 4 * options.max_in_flight + 2 * options.readers + 64
        max_unemitted = max_open + _REORDER_WINDOW if ordered else None
        self._pending = PendingQueue(items, self, max_open, max_unemitted)
        self._ordered = ordered
        self._out_of_order: dict[int, Outcome] = {}
        self._next_index = 0
        self._results: queue.SimpleQueue[tuple[PendingItem, _Result] | None] = queue.SimpleQueue()
        self._ready: deque[Outcome] = deque()
        self._suspects: list[Outcome] = []
        self._streak = FailureStreak()
        self.stalled: tuple[float, Exception] | None = None
        """Since when (``time.monotonic``) nothing has succeeded, and the failure that is being retried."""
        self._collectors: dict[int, _AnswerCollector] = {}
        self._claimed: set[bytes] = set()
        self._threads = [
            threading.Thread(target=self._read_items, name=f"vlfit-batch-{number}", daemon=True)
            for number in range(options.readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def finished(self) -> bool:
        """Whether every outcome has been returned."""
        return self._pending.finished and not self._ready and not self._suspects

    def next(self, timeout: float | None = None) -> Outcome | None:
        """Wait for the next outcome: at most ``timeout`` seconds; None: without limit.

        Returns None when all outcomes have been returned (see ``finished``), on timeout, and after ``wake``.

        Failures that may not be the picture's fault are held back until another picture succeeds, or the end
        of the source. If too many come in a row, ``VlfitError`` is raised and none of those pictures is
        returned as failed. Also raises errors that concern all pictures, and whatever iterating the items
        raised.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            if self._pending.finished or self._pending.blocked:
                self._emit_suspects()
                if not self._ready:
                    break
                continue
            try:
                result = self._results.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if result is not None:
                self._handle(*result)
            elif self._pending.source_error is not None:
                raise self._pending.source_error
            elif not self._pending.finished:
                return None
        return self._ready.popleft() if self._ready else None

    def wake(self) -> None:
        """Make the ``next`` that waits return None; if none does, the following one that would have to wait.

        May be called from a signal handler.
        """
        self._results.put(None)

    def close(self) -> None:
        """Stop reading items and cancel the requests in flight; their items get no outcome. Idempotent.

        Items of other streams that wait for an answer to one of these requests are retried.
        """
        self._pending.close()
        for collector in list(self._collectors.values()):
            collector.cancel()
        for digest in list(self._claimed):
            self._abandon(digest)

    def _abandon(self, digest: bytes) -> None:
        """Give up a claimed digest: items that waited for its answer ask the model themselves."""
        self._claimed.discard(digest)
        for waiting in self._executor.dedup.abandon(digest):
            waiting.stream._pending.retry(waiting, 0.0)

    def deliver(self, pending: PendingItem, result: _Result) -> None:
        """Queue the answer, duplicate's record or error of ``pending`` for ``next``.

        Never blocks; may be called from any thread.
        """
        self._collectors.pop(pending.index, None)
        self._results.put((pending, result))

    # --- in the reader threads -----------------------------------------------------------------------------

    def _read_items(self) -> None:
        while True:
            pending = self._pending.get()
            if pending is None:
                self._results.put(None)
                return
            try:
                self._start_request(pending)
            except Exception as error:
                self.deliver(pending, error)

    def _start_request(self, pending: PendingItem) -> None:
        """Read and prepare a picture, then start its request as soon as a slot is free."""
        executor = self._executor
        pending.tries += 1
        picture = executor.task.load(pending.item)
        if pending.digest is None:
            digest = digest_of(picture)
            claim = executor.dedup.claim(digest, pending)
            if claim is Claim.WAITING:
                return
            if not isinstance(claim, Claim):
                self.deliver(pending, claim)
                return
            pending.digest = digest
            self._claimed.add(digest)
        prepared = executor.task.prepare(executor.backend, picture)
        pending.picture = picture
        while not executor.slots.acquire(timeout=_POLL_SECONDS):
            if self._pending.closed:
                self._abandon(pending.digest)
                return
        _AnswerCollector(self, pending, prepared).start(executor)

    def register(self, collector: "_AnswerCollector") -> None:
        """Track ``collector`` until it delivers, so that ``close`` can cancel it."""
        self._collectors[collector.pending.index] = collector
        if self._pending.closed:
            collector.cancel()
            if collector.pending.digest is not None:
                self._abandon(collector.pending.digest)

    # --- in the thread that calls next ----------------------------------------------------------------------

    def _handle(self, pending: PendingItem, result: _Result) -> None:
        if isinstance(result, Exception):
            self._fail(pending, result)
        elif isinstance(result, Answer):
            assert pending.picture is not None
            try:
                record = self._executor.task.record(pending.item, pending.picture, result)
            except Exception as error:
                self._fail(pending, error)
                return
            self._succeed(pending, record)
        else:
            self._succeed(pending, duplicate_record(result, pending.item))

    def _succeed(self, pending: PendingItem, record: Record) -> None:
        self._streak.count_success()
        self.stalled = None
        self._emit_suspects()
        self._emit(Outcome(pending.item, record, None, pending.tries, pending.index))
        if pending.digest is not None:
            self._claimed.discard(pending.digest)
            for waiting in self._executor.dedup.resolve(pending.digest, record):
                waiting.stream.deliver(waiting, {**record, "same_as": record["key"]})
        self._finish(pending)

    def _fail(self, pending: PendingItem, error: Exception) -> None:
        pending.picture = None
        action = classify(error, pending.tries, self._executor.options.tries)
        if action is FailureAction.RETRY:
            self.stalled = (self.stalled[0] if self.stalled else time.monotonic(), error)
            self._pending.retry(pending, retry_delay(error, pending.tries))
            return
        if action is FailureAction.ABORT:
            raise error
        failed = Outcome(pending.item, None, error, pending.tries, pending.index)
        if is_picture_fault(error) or self._executor.options.keep_going:
            self._emit(failed)
        else:
            self._suspects.append(failed)
            stop = self._streak.count_failure(error)
            if stop is not None:
                raise stop from error
        if pending.digest is not None:
            self._claimed.discard(pending.digest)
            for waiting in self._executor.dedup.abandon(pending.digest):
                waiting.tries = pending.tries  # the same bytes were tried as often
                waiting.stream.deliver(waiting, error)
        self._finish(pending)

    def _finish(self, pending: PendingItem) -> None:
        pending.picture = None
        self._pending.item_finished()

    def _emit_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        for outcome in suspects:
            self._emit(outcome)

    def _emit(self, outcome: Outcome) -> None:
        """Make ``outcome`` available to ``next``; if ``ordered``, only once all earlier ones are."""
        if not self._ordered:
            self._ready.append(outcome)
            return
        self._out_of_order[outcome.number] = outcome
        while self._next_index in self._out_of_order:
            self._ready.append(self._out_of_order.pop(self._next_index))
            self._next_index += 1
            self._pending.outcome_emitted()


class _AnswerCollector:
    """Listener of one request: collects chunks into an ``Answer`` and frees the slot once, at the end."""

    def __init__(self, stream: OutcomeStream, pending: PendingItem, prepared: Prepared) -> None:
        self.pending = pending
        self._stream = stream
        self._prepared: Prepared | None = prepared
        self._images = prepared.images
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._splitter: ThinkingSplitter | None = None
        self._logprobs: list[TokenLogprob] = []
        self._ticket: Ticket | None = None
        self._slot: list[threading.Semaphore] = []

    def start(self, executor: BatchExecutor) -> None:
        """Start the request. The caller has acquired one of ``executor.slots`` for it."""
        self._slot.append(executor.slots)
        self._stream.register(self)
        self._splitter = ThinkingSplitter(executor.thinking) if executor.thinking else None
        prepared, self._prepared = self._prepared, None  # so that pixels are freed once the engine used them
        assert prepared is not None
        try:
            self._ticket = executor.backend.start(prepared, executor.task.sampling, self)
            if not self._slot:
                self._ticket.cancel()  # cancelled meanwhile, or finished, in which case this does nothing
        except Exception:
            if self._release_slot():  # else it has delivered a result already
                raise

    def __call__(self, arrival: Chunk | Exception) -> None:
        if isinstance(arrival, Exception):
            self._end(arrival)
            return
        if self._splitter is not None:
            arrival = self._splitter.split(arrival)
        self._images = arrival.images or self._images  # a server reports them with the answer
        self._text.append(arrival.text)
        self._thoughts.append(arrival.reasoning)
        self._logprobs.extend(arrival.logprobs)
        if arrival.finish_reason is None:
            return
        if arrival.finish_reason == "cancelled":
            self._end(EngineStopped("the request was cancelled before it finished", "Start the batch again."))
            return
        usage = arrival.usage or Usage(0, 0, 0)
        text, model = "".join(self._text), self._stream._executor.backend.model
        self._end(
            Answer(
                text,
                arrival.finish_reason,
                usage,
                model,
                self._images,
                arrival.timings,
                tuple(self._logprobs),
                arrival.pooled,
                "".join(self._thoughts),
            )
        )

    def cancel(self) -> None:
        """Cancel the request; nothing is delivered."""
        if self._release_slot() and self._ticket is not None:
            self._ticket.cancel()

    def _end(self, result: Answer | Exception) -> None:
        if self._release_slot():
            self._stream.deliver(self.pending, result)

    def _release_slot(self) -> bool:
        """Free the slot. False if that was done before."""
        with suppress(IndexError):  # ``pop`` is atomic, so one thread wins
            self._slot.pop().release()
            return True
        return False
