"""Our engine as a backend: conversations in, chunks out. Preparing runs in the caller's thread, the model in
the engine's own.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, Park
from vlfit.api.outputs import ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Rest
from vlfit.backends.base import Listener, Prepared, own
from vlfit.backends.in_process import InProcess, interrupts_held_back
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.loading import preload as head_start

if TYPE_CHECKING:
    from vlfit.engine.engine import Engine
    from vlfit.engine.loop import EngineLoop
    from vlfit.engine.scheduling.sequence import PricedPrompt, Sequence
    from vlfit.prompt.builder import Prompt


Progress = Callable[[str, float], None]

SPINS = "10000"


def import_engine() -> None:
    """Import the engine, and torch with it, in the way that suits a computer with other things to do."""
    # torch's threads wait for each other by spinning, for milliseconds. On a machine whose cores are also
    # wanted elsewhere every small operation then lasts as long as a turn of the scheduler: mini was 25 times
    # slower beside one busy process. Not spinning at all costs a quarter on a quiet machine; a short spin is
    # the middle (docs/log.md). torch's OpenMP reads this when torch is loaded; what the user set stands.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    collects = gc.isenabled()
    gc.disable()  # what is imported stays: looking through it again and again takes a tenth of the time
    try:
        with interrupts_held_back():
            import vlfit.engine.loop  # noqa: F401
    finally:
        if collects:
            gc.enable()


class NativeBackend(InProcess):
    """Build with ``load``."""

    kind = "native"
    checkpoint: Checkpoint
    _loop: "EngineLoop"

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint,
        options: EngineOptions | None = None,
        progress: Progress | None = None,
    ) -> "NativeBackend":
        """Open a checkpoint (``mini``, a folder, a hub id) and load it.

        Raises ``CheckpointError``, ``HubError`` or ``DeviceError``. ``progress`` is told what is being done
        and the share of it that is done.
        """
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        # torch takes a second or more to import: not before the checkpoint has shown that it is sound.
        if progress is not None and "torch" not in sys.modules:
            progress("importing torch", 0.0)
        options = options or EngineOptions()
        head_start.import_triton(options.device)
        import_engine()
        from vlfit.engine.engine import Engine
        from vlfit.engine.execution import warmup as every_kind
        from vlfit.engine.execution import warmup as rehearsal
        from vlfit.engine.loop import EngineLoop
        from vlfit.kernels import launch as compiled

        def build(report: Progress) -> Engine:
            kernels = compiled.listen(options.device)
            engine = Engine(checkpoint, options, report)
            if engine.options.keep_to_plan and engine.device.type == "cuda":
                report("rehearsing the worst case", 1.0)
                rehearsal.profile_peak_memory(engine)
                every_kind.warm_up_kernels(engine)
            kernels.tell()
            return engine

        return cls(checkpoint, EngineLoop(build, progress))

    @property
    def sequences(self) -> int:
        """Requests that run at once; more wait."""
        return self._loop.engine.options.sequences

    @property
    def engine(self) -> "Engine":
        """What runs the model, for whoever measures it. What it changes, its own thread alone may touch."""
        return self._loop.engine

    @property
    def asleep(self) -> bool:
        return self._loop.engine.sleep.asleep is not None

    def sleep(self, park: Park = "auto") -> "Future[Rest]":
        """Give the memory back as soon as nothing runs or waits; the next request wakes it."""
        return self._loop.sleep(park)

    def wake(self) -> "Future[Rest]":
        """Take the memory again, before a request does."""
        return self._loop.wake()

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> "NativePrepared":
        asked = time.perf_counter()
        engine = self._loop.engine
        prompt = engine.prompts.build(conversation, engine.image_limit, engine.context, tools)
        return self._priced(prompt, sampling, asked)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> "NativePrepared":
        asked = time.perf_counter()
        engine = self._loop.engine
        return self._priced(engine.prompts.raw(prompt, engine.context), sampling, asked)

    def _priced(self, prompt: "Prompt", sampling: SamplingParams, asked: float) -> "NativePrepared":
        engine = self._loop.engine
        priced = engine.price(prompt)
        most = engine.max_tokens(priced.tokens, sampling)
        engine.constraints.of(sampling.form)  # what is wrong with a form is found before anybody waits
        return NativePrepared(priced, tuple(image.seen for image in prompt.images), asked, most)

    def _request(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> "Sequence":
        mine = own(prepared, NativePrepared)
        return self._loop.engine.sequence(mine.priced, sampling, listener, mine.asked)


@dataclass(frozen=True, slots=True)
class NativePrepared:
    priced: "PricedPrompt"
    images: tuple[ImageSeen, ...]
    asked: float
    most_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.priced.tokens

    @property
    def image_tokens(self) -> int:
        return len(self.priced.placeholders)
