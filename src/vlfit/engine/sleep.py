"""An engine gives its device back and takes it again: what is kept, what is forgotten, what must be free.

Asleep, the weights wait in RAM, or in the files that they came from; the KV pool is gone, and with it what
was known of earlier prompts, as are pictures' features, workspaces and graphs. On a GPU the CUDA context is
what stays. Waking asks for the memory first: where others have it, all stays as it is, for the next who asks.
Knows what holds memory. Does not know when to sleep (``loop.py``) or how bytes are carried (``parking.py``).
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import UntypedStorage

from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.account import Asleep
from vlfit.engine.budget import Budget, is_shortage
from vlfit.engine.holdings import halves_in, storages_in
from vlfit.engine.layers.halves import Half
from vlfit.engine.options import Park
from vlfit.engine.parking import Parked, empty, give_back_ram
from vlfit.engine.passes import drop_tracebacks
from vlfit.engine.runner import Runner
from vlfit.engine.scheduler import Scheduler
from vlfit.errors import CannotWake, DoesNotFit, MissingFile, UsageError
from vlfit.machine.host import read_host
from vlfit.units import MIB, format_bytes

logger = logging.getLogger(__name__)

RAM_LEFT = 512 * MIB  # what parked weights leave of the RAM that is free: a choice, for the desktop
RETRY_SECONDS = 10  # until somebody may have closed a program: a choice


class Sleep:
    """``least``: blocks that the pool has at least after waking; ``reserve``: bytes that more of them leave
    free. ``release`` forgets graphs and gives torch's spare memory back to the driver. ``load_again`` builds
    the model from its files anew and puts it where the old one is.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        runner: Runner,
        scheduler: Scheduler,
        budget: Budget,
        least: int,
        reserve: int,
        release: Callable[[], None],
        load_again: Callable[[], None],
    ) -> None:
        self.asleep: Asleep | None = None
        self._files = {info.file for info in checkpoint.tensors.values()}
        self._runner = runner
        self._scheduler = scheduler
        self._budget = budget
        self._least = least
        self._most = scheduler.pool.blocks
        self._reserve = reserve
        self._release = release
        self._load_again = load_again
        self._parked: Parked | None = None
        self._beside = 0  # bytes that are held beside the KV pool when awake

    def fall_asleep(self, park: Park = "auto") -> Asleep:
        """Nothing may run or wait. Raises ``DoesNotFit`` where ``park`` is ``ram`` and there is too little of
        it, ``UsageError`` where that would free nothing, ``MissingFile`` where no files are there to wake
        from; then all is as it was.
        """
        began = time.perf_counter()
        size = sum(storage.nbytes() for storage in self._storages()[0])
        size += sum(half.nbytes() for half in self._halves())
        place = self._place(park, size)
        held = self._held(size)
        cache = self._runner.cache.nbytes
        self._release()  # graphs first: they have tensors of their own, at addresses of their own
        weights, tables = self._storages()
        if place == "ram":
            try:
                self._parked = Parked([*weights, *tables], self._budget.device)
            except MemoryError:  # somebody was faster
                if park == "ram":
                    raise _too_little_ram(size) from None
                self._check_files()
                place = "files"
        if place == "files":
            self._parked = Parked(tables, self._budget.device)
        self._empty()
        freed = held - self._held(0)
        self._beside = freed - cache
        seconds = round(time.perf_counter() - began, 3)
        self.asleep = Asleep(place, size if place == "ram" else 0, freed, seconds)
        return self.asleep

    def wake(self) -> None:
        """Have all back. Raises ``CannotWake`` where there is too little memory, or what reading the files
        raises; then it sleeps on, and nothing is lost.
        """
        if self.asleep is None:
            return
        free = self._budget.free()
        block = self._runner.cache.block_bytes
        needed = self._beside + self._least * block
        if free < needed:
            raise self._cannot(needed)
        if self._reserve:
            free = min(free, self._budget.device_free() - self._reserve)
        fitting = (free - self._beside) // block
        failure = self._attempt(self.asleep, min(self._most, max(fitting, self._least)))
        if failure is not None:
            # A traceback holds frames, and they hold what was allocated so far.
            drop_tracebacks(failure)
            self._empty()
            raise self._cannot(needed) if is_shortage(failure) else failure
        self._parked = None
        self.asleep = None

    def _attempt(self, asleep: Asleep, blocks: int) -> Exception | None:
        """Weights, then a pool of ``blocks``; what went wrong is given, not raised."""
        try:
            if self._parked is not None:
                self._parked.restore()
            if asleep.parked == "files":
                self._load_again()
            self._resize_pool(blocks)
        except Exception as error:
            return error
        return None

    def _empty(self) -> None:
        """Give back all that the engine holds on the device."""
        self._runner.image_cache.clear()
        self._resize_pool(0)
        weights, tables = self._storages()
        empty([*weights, *tables])
        for half in self._halves():
            half.empty()
        if self._budget.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # of matrix products; they come back with the first
        else:
            give_back_ram()
        self._release()

    def _resize_pool(self, blocks: int) -> None:
        self._scheduler.resize(blocks)
        self._runner.cache.resize(blocks, {}, self._release)

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """What the model has on the device, and what tables the runner has there, which no file holds.

        Without the caches, which nobody misses.
        """
        runner, device = self._runner, self._budget.device.type
        seen = {id(runner.cache), id(runner.image_cache)}
        weights = list(storages_in((runner.text, runner.vision), seen))
        tables = list(storages_in(runner, seen))
        return (
            [storage for storage in weights if storage.device.type == device],
            [storage for storage in tables if storage.device.type == device],
        )

    def _halves(self) -> list[Half]:
        """Matrices that are laid out for a CPU's products. They come from the files again, as all there."""
        return halves_in((self._runner.text, self._runner.vision))

    def _held(self, weights: int) -> int:
        """Bytes of the device: what torch took of it, or on a CPU ``weights`` and the caches."""
        if self._budget.device.type == "cuda":
            return torch.cuda.memory_reserved(self._budget.device)
        return weights + self._runner.cache.nbytes + self._runner.image_cache.used_bytes

    def _place(self, park: Park, size: int) -> str:
        """``ram`` or ``files``. Raises what ``fall_asleep`` does."""
        if self._budget.device.type == "cpu":
            if park == "ram":
                raise UsageError(
                    "the model runs on a CPU: its weights are in RAM, and parking them there frees nothing",
                    "use files: they are read again when it wakes",
                    param="park",
                )
            park = "files"
        free = read_host().ram_available
        if park != "files" and size + RAM_LEFT <= free:
            return "ram"
        if park == "ram":
            raise _too_little_ram(size)
        self._check_files()
        if park == "auto":
            logger.info(
                "%s of weights are read from the files again when it wakes: %s of RAM are free",
                *map(format_bytes, (size, free)),
            )
        return "files"

    def _check_files(self) -> None:
        for file in self._files:
            if not file.exists():
                raise MissingFile(f"{file} is gone: the model could not wake", "park it in RAM")

    def _cannot(self, needed: int) -> CannotWake:
        return CannotWake(
            f"the model sleeps and cannot wake: it needs {format_bytes(needed)}, {self._budget.shortage()}",
            "close programs that have the memory (vlfit machine names those on a GPU) and ask again",
            retry_after=RETRY_SECONDS,
        )


def _too_little_ram(size: int) -> DoesNotFit:
    free = format_bytes(read_host().ram_available)
    return DoesNotFit(
        f"{format_bytes(size)} of weights do not fit in RAM, of which {free} are free and "
        f"{format_bytes(RAM_LEFT)} are left to others",
        "use files: they are read again when it wakes",
        param="park",
    )
