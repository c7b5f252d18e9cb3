"""Sees a GPU that no longer answers: requests run, and for long no step of the engine has ended.

Knows: the engine's account, which is read without asking the engine. Does not know: why a step does not end,
or what is done about it (``disconnect.py``: the server ends, and is started again where somebody keeps it).
"""

import asyncio
import time
from collections.abc import Callable

from vlfit.api.stats import EngineAccount
from vlfit.backends.base import Accountable, LocalBackend
from vlfit.errors import EngineLost

LOOK_SECONDS = 5.0
# A choice: many times the longest step of a GPU, compiling its kernels included. Steps on a CPU have no bound
# worth the name, and a CPU does not hang.
HUNG_SECONDS = 120.0


class Watchdog:
    """Looks at ``backend`` every few seconds for as long as ``watch`` runs; ``judge`` is told of the loss."""

    def __init__(
        self,
        backend: LocalBackend,
        judge: Callable[[Exception], None],
        seconds: float = HUNG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._judge = judge
        self._seconds = seconds
        self._clock = clock
        self._seen: object = None
        self._since = clock()

    async def watch(self) -> None:
        """Until it is cancelled, or there is nothing to watch any more."""
        while isinstance(self._backend, Accountable):
            if self.look(self._backend.account()):
                return
            await asyncio.sleep(min(LOOK_SECONDS, self._seconds))

    def look(self, account: EngineAccount) -> bool:
        """Whether the engine hangs; ``judge`` has been told then."""
        now = self._clock()
        # Who only waits may do so for memory that another program has.
        runs = bool(account.running) and account.asleep is None
        seen = (account.counters, account.running, account.pool.used) if runs else None
        if seen is None or seen != self._seen or account.settings.device == "cpu":
            self._seen, self._since = seen, now
            return False
        if now - self._since < self._seconds:
            return False
        self._judge(
            EngineLost(
                f"the engine has ended no step for {now - self._since:.0f} s, and requests run",
                "start the server again; `nvidia-smi` and `dmesg` may tell what the GPU does",
            )
        )
        return True
