"""Any image-text model that the installed transformers runs, in this process, as a backend."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import LoadProgress
from vlfit.backends.base import Capabilities
from vlfit.backends.in_process import InProcessBackend, import_engine, interrupts_held_back
from vlfit.checkpoint.any_model import AnyCheckpoint, open_any
from vlfit.checkpoint.hub import FileSelection, transformers_files
from vlfit.checkpoint.source import Checkpoint
from vlfit.images.decode_pool import decode_pool
from vlfit.plan.actual import Expectation

if TYPE_CHECKING:
    from vlfit.backends.transformers.generate_engine import TransformersEngine


def wanted_files(*, code: bool = False) -> FileSelection:
    """The files to fetch of a model on the hub whose architecture the installed transformers knows.

    ``code``: the checkpoint may bring its own Python files.
    """

    def check(folder: Path) -> None:
        from vlfit.backends.transformers.auto_model import check_known

        check_known(folder, code=code)

    return transformers_files(check, code=code)


class TransformersBackend(InProcessBackend):
    """Build with ``load``."""

    kind = "transformers"
    capabilities = Capabilities(account=True, plan=True)
    checkpoint: AnyCheckpoint

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint | AnyCheckpoint,
        options: EngineOptions | None = None,
        progress: LoadProgress | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> "TransformersBackend":
        """Open a checkpoint of any architecture (a folder, a hub id, ``mini``) and load it.

        ``trust_remote_code``: run Python files that come with the checkpoint. Raises ``UsageError`` for a
        missing package and for options of the native engine alone, ``CheckpointError``, ``HubError``,
        ``DeviceError``, and ``DoesNotFit`` before anything is loaded.
        """
        if progress is not None and "transformers" not in sys.modules:
            progress("importing transformers", 0.0)
        decode_pool().start()
        _import_packages()
        if isinstance(model, Checkpoint):
            model = model.folder
        if isinstance(model, AnyCheckpoint):
            checkpoint = model
        else:
            checkpoint = open_any(model, wanted_files(code=trust_remote_code))
        from vlfit.backends.transformers.generate_engine import TransformersEngine
        from vlfit.engine.engine_thread import EngineThread

        def build(report: LoadProgress) -> TransformersEngine:
            return TransformersEngine(
                checkpoint, options or EngineOptions(), report, trust_remote_code=trust_remote_code
            )

        return cls(checkpoint, EngineThread(build, progress))

    @property
    def engine(self) -> "TransformersEngine":
        """The engine itself. Only its own thread may change its state."""
        engine: TransformersEngine = self._engine_thread.engine
        return engine

    @property
    def expectation(self) -> Expectation:
        """The ledger as planned, with measured lines where nothing could be planned."""
        lines = self.engine.lines
        return Expectation(lines, why_not="" if lines else "the driver does not report the GPU: no plan")


def _import_packages() -> None:
    """Import torch, and check that transformers is there. Raises ``UsageError`` if it is not."""
    import_engine()
    with interrupts_held_back():
        from vlfit.backends.transformers.auto_model import transformers

        transformers()
