"""Detection of a hung GPU: requests run, but no engine step has finished for two minutes.

Reads only the engine's account, which needs no answer from the engine. The server then shuts down
(``disconnect.py``) and the supervisor starts it again.
"""

import asyncio
import time
from collections.abc import Callable

from vlfit.api.stats import EngineAccount
from vlfit.backends.base import Backend
from vlfit.errors import EngineLost

CHECK_SECONDS = 5.0
# Many times the longest step of a GPU, kernel compilation included. CPUs are not watched: their steps have no
# useful bound.
HANG_SECONDS = 120.0


class Watchdog:
    """Checks ``backend`` every few seconds while ``watch`` runs; calls ``on_hang`` if its GPU hangs.

    It hangs if requests have run for ``hang_seconds`` without a finished step. A CPU never counts as hung.
    ``on_hang`` gets an ``EngineLost``. ``clock``: returns seconds.
    """

    def __init__(
        self,
        backend: Backend,
        on_hang: Callable[[Exception], None],
        hang_seconds: float = HANG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._on_hang = on_hang
        self._seconds = hang_seconds
        self._clock = clock
        self._last_progress: object = None
        self._since = clock()

    async def watch(self) -> None:
        """Check until cancelled, or a hang was reported; return at once if the backend has no account."""
        while self._backend.capabilities.account:
            if self.check(self._backend.account()):
                return
            await asyncio.sleep(min(CHECK_SECONDS, self._seconds))

    def check(self, account: EngineAccount) -> bool:
        """Compare ``account`` with those of earlier calls. If the GPU hangs, call ``on_hang``; return
        True."""
        now = self._clock()
        # Waiting requests do not count: they may wait for GPU memory that another program holds.
        runs = bool(account.running) and account.asleep is None
        progress = (account.counters, account.running, account.pool.used) if runs else None
        if progress is None or progress != self._last_progress or account.settings.device == "cpu":
            self._last_progress, self._since = progress, now
            return False
        if now - self._since < self._seconds:
            return False
        self._on_hang(
            EngineLost(
                f"the engine has finished no step for {now - self._since:.0f} s while requests run",
                "Restart the server; `nvidia-smi` and `dmesg` may show what the GPU is doing.",
            )
        )
        return True
