"""What a loaded model was planned to take, and what it holds: the ledger of a running backend."""

from dataclasses import replace

from vlfit.api.stats import EngineAccount
from vlfit.backends.base import Backend
from vlfit.checkpoint.source import Checkpoint
from vlfit.images.media_pool import decoder_resident_bytes
from vlfit.machine.gpu import gpu_of_device
from vlfit.machine.model import Gpu
from vlfit.plan import actual
from vlfit.plan.actual import Expectation, Row
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native import expectation
from vlfit.plan.native.ram import image_decoders_line, snapshots_in_ram_line


def expected_memory(backend: Backend, gpus: tuple[Gpu, ...], *, takes_media: bool = False) -> Expectation:
    """The planned memory of the model that ``backend`` runs.

    ``gpus``: as read before the model was loaded. If there is no plan (a remote server, an unknown
    architecture, a GPU that NVML does not list), the result has no lines and a ``no_lines_reason``.
    """
    if backend.capabilities.plan:
        return backend.expectation
    if not backend.capabilities.account:
        return Expectation(
            no_lines_reason=f"the model runs at {backend.device}; its memory is not known here"
        )
    account, checkpoint = backend.account(), backend.checkpoint
    if not isinstance(checkpoint, Checkpoint):
        return Expectation(no_lines_reason="there is no plan for checkpoints of this architecture")
    running = account.settings
    if running.device == "cpu":
        planned = expectation.expect_in_ram(
            checkpoint,
            running.kv_tokens,
            running.value_bytes,
            cpu_16_bit=running.cpu_16_bit,
            cpu_stored=running.cpu_stored,
            kv_dtype=running.kv_dtype,
            sequences=running.sequences,
            speculate=running.draft_model,
        )
        decoders = (image_decoders_line(media=takes_media),) if checkpoint.config.vision is not None else ()
        limit = account.memory.state_snapshots_limit
        snapshots = (snapshots_in_ram_line(limit),) if limit else ()
        return replace(planned, lines=(*planned.lines, *snapshots, *decoders))
    gpu = engine_gpu(account, gpus)
    if gpu is None:
        return Expectation(no_lines_reason="NVML does not report the GPU that the model runs on")
    settings = PlanSettings(
        checkpoint.weights_format,
        running.context,
        running.image_tokens,
        running.sequences,
        running.chunk,
        offloaded_layers=running.offload,
        kv_dtype=running.kv_dtype,
        speculate=running.speculate,
        draft_model=running.draft_model,
        table_in_ram=running.table_in_ram,
        state_snapshots=running.state_snapshots,
    )
    return expectation.expect_on_gpu(checkpoint, gpu, settings, running.value_bytes, running.kv_tokens)


def engine_gpu(account: EngineAccount, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The one of ``gpus`` that the engine runs on; None on a CPU, or if NVML does not list it."""
    if account.settings.device == "cpu":
        return None
    return gpu_of_device(gpus, account.settings.gpu_uuid, account.settings.device)


def ledger_rows(account: EngineAccount, gpu: Gpu | None, expectation: Expectation) -> tuple[Row, ...]:
    """Ledger rows with planned and actual bytes: of RAM if the engine runs on a CPU, of ``gpu`` otherwise.

    ``gpu`` None on a GPU engine (NVML does not list it): only lines that the engine measures itself have
    actual bytes.
    """
    memory = account.memory
    if account.settings.device == "cpu":
        return actual.compare_in_ram(
            expectation,
            memory.weights,
            memory.kv_cache,
            memory.image_cache,
            memory.resident_before,
            decoder_resident_bytes(),
            memory.state_cache,
            memory.state_snapshots,
        )
    if gpu is None:
        return actual.pair_rows(expectation.lines, {**memory.weights, "kv_cache": memory.kv_cache}, {})
    return actual.compare_on_gpu(
        gpu,
        expectation,
        memory.weights,
        memory.kv_cache,
        memory.reserved or 0,
        memory.cuda_graphs,
        memory.state_cache,
        memory.device_snapshots,
    )
