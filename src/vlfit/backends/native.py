"""vlfit's own engine as a backend. Requests are prepared in the caller's thread and run in the engine's."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions
from vlfit.api.pooling import PoolingParams
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Capabilities, check_generates
from vlfit.backends.in_process import InProcessBackend, import_engine
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.images.decode_pool import decode_pool
from vlfit.loading import preload
from vlfit.loading.kernel_build import start_build
from vlfit.plan.gpus import check_gpus
from vlfit.prompt.template_process import TEMPLATES

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine
    from vlfit.engine.engine_thread import EngineThread
    from vlfit.engine.request import PreparedRequest


logger = logging.getLogger(__name__)

KERNEL_SECONDS = 300.0  # that a start waits for kernels compiled ahead


class NativeBackend(InProcessBackend):
    """A checkpoint loaded into vlfit's own engine. Build with ``load``."""

    kind = "native"
    capabilities = Capabilities(account=True, sleep=True)
    checkpoint: Checkpoint

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint,
        options: EngineOptions | None = None,
        progress: LoadProgress | None = None,
    ) -> "NativeBackend":
        """Open a checkpoint (``mini``, a folder, a hub id) and load it.

        Downloads what is missing. Also starts the process that renders chat templates, and for a vision model
        those that decode pictures. On a GPU with ``options.enforce_plan`` also runs the plan's worst case and
        warms up the kernels. ``options`` None: the defaults. Raises ``CheckpointError``, ``HubError``,
        ``DeviceError`` or ``DoesNotFit``.
        """
        options = options or EngineOptions()
        check_gpus(options.device, options.kernels, preload.gpus_at_start())
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        if checkpoint.config.vision is not None:
            decode_pool().start()
        TEMPLATES.start()
        # torch takes a second or more to import: only once the checkpoint is known to be sound.
        if progress is not None and "torch" not in sys.modules:
            progress("importing torch", 0.0)
        where = checkpoint.folder if isinstance(model, Checkpoint) else model
        compiling = start_build(where, checkpoint, options)
        preload.import_triton("cpu" if options.kernels == "plain" else options.device)
        import_engine()
        from vlfit.engine.engine import NativeEngine
        from vlfit.engine.engine_thread import EngineThread
        from vlfit.engine.execution import warmup
        from vlfit.kernels import launch

        def build(report: LoadProgress) -> NativeEngine:
            kernels = launch.count_compilations(options.device)

            def wait_for_kernels() -> None:
                if compiling is not None and not compiling.wait(report, KERNEL_SECONDS):
                    failure = compiling.failure or f"not done in {KERNEL_SECONDS:.0f} s"
                    logger.warning("kernels are compiled one by one, which takes longer: %s", failure)

            try:
                engine = NativeEngine(checkpoint, options, report, before_launches=wait_for_kernels)
            finally:
                if compiling is not None:
                    compiling.stop()
            if engine.options.enforce_plan and engine.device.type == "cuda":
                report("profiling the worst case", 1.0)
                warmup.profile_peak_memory(engine)
                warmup.warm_up_kernels(engine)
            kernels.log_summary()
            return engine

        return cls(checkpoint, EngineThread(build, progress))

    def __init__(self, checkpoint: Checkpoint, engine_thread: "EngineThread[NativeEngine]") -> None:
        super().__init__(checkpoint, engine_thread)
        self.pooling = self.engine.pooling
        self.capabilities = replace(
            type(self).capabilities,
            generates=self.pooling.kind == "chat",
            embeds=self.pooling.kind != "reranker",
            scores=bool(self.engine.runner.score_tokens),
        )

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> "PreparedRequest[Any]":
        """As in the base class. Raises ``InvalidRequest`` for a model that writes no text."""
        check_generates(self)
        return super().prepare(conversation, sampling, tools)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> "PreparedRequest[Any]":
        """``prepare`` for plain text or token ids, without a chat template."""
        check_generates(self)
        return super().prepare_text(prompt, sampling)

    def prepare_pooled(
        self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams
    ) -> "PreparedRequest[Any]":
        """Prepare a request for a vector or a score, on the caller's thread; see ``Backend``."""
        return self.engine.prepare_pooled(prompt, pooling)

    @property
    def engine(self) -> "NativeEngine":
        """The engine. Only its own thread may change its state."""
        engine: NativeEngine = self._engine_thread.engine
        return engine

    @property
    def sequences(self) -> int:
        """Most requests that run at once; others wait in a queue."""
        return self.engine.options.max_num_seqs
