"""The backend ``transformers``: any image-text model that the installed transformers runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import LoadProgress
from vlfit.backends.base import Capabilities
from vlfit.backends.in_process import InProcessBackend, defer_interrupts, import_engine
from vlfit.checkpoint.any_model import AnyCheckpoint, open_any_checkpoint
from vlfit.checkpoint.hub import FileSelection, transformers_files
from vlfit.checkpoint.source import Checkpoint
from vlfit.images.decode_pool import decode_pool
from vlfit.plan.actual import Expectation

if TYPE_CHECKING:
    from vlfit.backends.transformers.generate_engine import TransformersEngine


def files_to_download(*, trust_remote_code: bool = False) -> FileSelection:
    """The files to download of a hub model that this backend is to run.

    Downloads nothing: the result is passed to ``hub`` or ``source``. Its ``check`` gets the folder with
    config.json before any weights are downloaded, and raises ``UnknownArchitecture`` if the installed
    transformers cannot run the model. ``trust_remote_code``: include the model's own Python files, which
    may define the architecture.
    """

    def check(folder: Path) -> None:
        from vlfit.backends.transformers.auto_model import check_architecture

        check_architecture(folder, trust_remote_code=trust_remote_code)

    return transformers_files(check, code=trust_remote_code)


class TransformersBackend(InProcessBackend):
    """A checkpoint loaded through transformers, one request at a time. Build with ``load``."""

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

        Downloads what is missing, and starts the processes that decode pictures. ``options`` None: the
        defaults. ``trust_remote_code``: run Python files that come with the checkpoint. Raises ``UsageError``
        for a missing package and for options that only the native engine has, ``CheckpointError``,
        ``HubError``, ``DeviceError``, and ``DoesNotFit``, most often before anything is loaded.
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
            checkpoint = open_any_checkpoint(model, files_to_download(trust_remote_code=trust_remote_code))
        from vlfit.backends.transformers.generate_engine import TransformersEngine
        from vlfit.engine.engine_thread import EngineThread

        def build(report: LoadProgress) -> TransformersEngine:
            return TransformersEngine(
                checkpoint, options or EngineOptions(), report, trust_remote_code=trust_remote_code
            )

        return cls(checkpoint, EngineThread(build, progress))

    @property
    def engine(self) -> "TransformersEngine":
        """The engine. Only its own thread may change its state."""
        engine: TransformersEngine = self._engine_thread.engine
        return engine

    @property
    def expectation(self) -> Expectation:
        """The ledger, with measured bytes after a profiling run; nothing is known about a decode step's time.

        If the driver does not report the GPU there are no ``lines``, and ``no_lines_reason`` says so.
        """
        lines = self.engine.lines
        return Expectation(
            lines, no_lines_reason="" if lines else "the driver does not report the GPU: no plan"
        )


def _import_packages() -> None:
    """Import torch, and check that transformers is there. Raises ``UsageError`` if it is not."""
    import_engine()
    with defer_interrupts():
        from vlfit.backends.transformers.auto_model import import_transformers

        import_transformers()
