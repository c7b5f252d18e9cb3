"""Models that only transformers runs, as a backend: conversations in, chunks out, in this process.

Knows: how such a model is opened and asked. Does not know: its architecture (``engine/any_model/``), or what
fits (``plan/transformers/cost.py``).
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Listener, Prepared, own
from vlfit.backends.in_process import InProcess, interrupts_held_back
from vlfit.backends.native import Progress
from vlfit.checkpoint.any_model import AnyCheckpoint, open_any
from vlfit.checkpoint.hub import Files, any_model
from vlfit.checkpoint.source import Checkpoint
from vlfit.plan.actual import Expectation

if TYPE_CHECKING:
    from vlfit.backends.transformers.engine_loop import AnyLoop
    from vlfit.backends.transformers.generate import Request
    from vlfit.backends.transformers.processor_prompts import AnyPrompt


def wanted_files(*, code: bool = False) -> Files:
    """What is fetched of a model on the hub, for an architecture that the installed transformers runs."""

    def check(folder: Path) -> None:
        from vlfit.backends.transformers.auto_model import check_known

        check_known(folder, code=code)

    return any_model(check, code=code)


class TransformersBackend(InProcess):
    """Build with ``load``."""

    kind = "transformers"
    checkpoint: AnyCheckpoint
    _loop: "AnyLoop"

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint | AnyCheckpoint,
        options: EngineOptions | None = None,
        progress: Progress | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> "TransformersBackend":
        """Open a checkpoint of any architecture (a folder, a hub id, ``mini``) and load it.

        Raises ``UsageError`` for a package that is missing and for options that only the native engine has,
        ``CheckpointError``, ``HubError``, ``DeviceError``, and ``DoesNotFit`` before anything is loaded.
        ``trust_remote_code``: Python files that come with the checkpoint are run.
        """
        if progress is not None and "transformers" not in sys.modules:
            progress("importing transformers", 0.0)
        _import_packages()
        if isinstance(model, Checkpoint):
            model = model.folder
        if isinstance(model, AnyCheckpoint):
            checkpoint = model
        else:
            checkpoint = open_any(model, wanted_files(code=trust_remote_code))
        from vlfit.backends.transformers.engine_loop import AnyLoop
        from vlfit.backends.transformers.generate_engine import AnyEngine, Load

        load = Load(checkpoint, options or EngineOptions(), trust_remote_code)
        return cls(checkpoint, AnyLoop(lambda report: AnyEngine(load, report), progress))

    @property
    def expectation(self) -> Expectation:
        """The ledger as it was planned, and measured where it could not be planned."""
        lines = self._loop.engine.lines
        return Expectation(lines, why_not="" if lines else "the driver does not tell of the GPU: no plan")

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> "TransformersPrepared":
        asked = time.perf_counter()
        return self._priced(self._loop.engine.prompts.build(conversation, tools), sampling, asked)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> "TransformersPrepared":
        asked = time.perf_counter()
        return self._priced(self._loop.engine.prompts.raw(prompt), sampling, asked)

    def _priced(self, prompt: "AnyPrompt", sampling: SamplingParams, asked: float) -> "TransformersPrepared":
        engine = self._loop.engine
        most = engine.price(prompt, sampling)
        engine.words.constraint(sampling.form)  # what is wrong with a form is found before anybody waits
        return TransformersPrepared(prompt, most, asked)

    def _request(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> "Request":
        mine = own(prepared, TransformersPrepared)
        return self._loop.engine.request(mine.prompt, sampling, listener, mine.asked)


@dataclass(frozen=True, slots=True)
class TransformersPrepared:
    """A request with its tokens counted and its pictures as the model's processor makes them."""

    prompt: "AnyPrompt"
    most_tokens: int
    asked: float

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        return self.prompt.seen

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def image_tokens(self) -> int:
        return self.prompt.image_tokens


def _import_packages() -> None:
    """torch, and what says that transformers is there. Raises ``UsageError`` where it is not."""
    from vlfit.backends.native import import_engine

    import_engine()
    with interrupts_held_back():
        from vlfit.backends.transformers.auto_model import transformers

        transformers()
