"""The completions of one request while they run: started together, read side by side, ended together.

Knows: tickets, and threads that are not the event loop's. Does not know: what is done with the chunks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from vlfit.backends.base import LocalBackend, Prepared, TakenLater, Ticket
from vlfit.engine.answer import Chunk
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import EngineStopped


class Choices:
    """One completion of each of ``prepared`` (the same one may be there several times), all started on
    entering, none left running on leaving.

    ``ended`` is called with the last that comes of each of them, however slowly its client reads.
    """

    def __init__(
        self,
        backend: LocalBackend,
        prepared: Sequence[Prepared],
        sampling: SamplingParams,
        ended: Callable[[Chunk | Exception], None],
    ) -> None:
        self._backend = backend
        self._prepared = list(prepared)
        self._sampling = sampling
        self._ended = ended
        self._tickets: list[Ticket] = []
        self._arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()

    def __enter__(self) -> "Choices":
        try:
            for index, prepared in enumerate(self._prepared):
                self._start(index, prepared, asyncio.get_running_loop())
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()
        # A ticket knows who listens, and that is us: in such a circle pictures would wait for the garbage
        # collector, which in a process of so many objects looks at old ones every few hundred requests.
        self._tickets.clear()
        self._prepared.clear()

    async def taken(self, seconds: float) -> None:
        """Until a server that the backend asks has taken them, or for ``seconds``: who is refused there can
        be told with a status while no byte has gone out. Raises why.
        """
        waited = [asyncio.wrap_future(each.taken) for each in self._tickets if isinstance(each, TakenLater)]
        if not waited:
            return
        await asyncio.wait(waited, timeout=seconds)
        while any(each.done() and not each.result() for each in waited):
            _, item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item

    async def chunks(self, ping_seconds: float) -> AsyncIterator[tuple[int, Chunk | None]]:
        """Chunks as they come, with the number of their choice; ``None`` after each ``ping_seconds`` of
        silence.
        """
        running = len(self._tickets)
        while running:
            try:
                async with asyncio.timeout(ping_seconds):
                    index, item = await self._arrived.get()
            except TimeoutError:
                yield 0, None
                continue
            if isinstance(item, Exception):
                raise item
            if item.finish_reason == "cancelled":  # not by us: we stop listening first
                raise EngineStopped("the engine gave the request up", "try again")
            running -= item.finish_reason is not None
            yield index, item

    def _start(self, index: int, prepared: Prepared, loop: asyncio.AbstractEventLoop) -> None:
        def listen(item: Chunk | Exception) -> None:
            """Called from the engine's thread."""
            with suppress(RuntimeError):  # the event loop has ended: nobody reads any more
                loop.call_soon_threadsafe(self._arrive, index, item)

        # With one seed for all, the choices would be one and the same text.
        seed = self._sampling.seed
        sampling = (
            replace(self._sampling, seed=seed + index) if seed is not None and index else self._sampling
        )
        self._tickets.append(self._backend.start(prepared, sampling, listen))

    def _arrive(self, index: int, item: Chunk | Exception) -> None:
        if isinstance(item, Exception) or item.finish_reason is not None:
            self._ended(item)
        self._arrived.put_nowait((index, item))

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
