"""One process that loads a checkpoint on a GPU, runs the worst case that its plan admits, and reports memory.

    python -m benchmarks.ledger_workers JOB      with a line on stdin to start; prints ``HeldMemory`` as JSON

``benchmarks.ledger`` starts it. Slow imports come before it waits for that line: until then the process
before it may still be measuring.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_memory import GpuMeter

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine

NATIVE, TRANSFORMERS = "native", "transformers"
ROUNDED = "-rounded"
_ANSWER = 8  # tokens
_FILLER = 100  # a token id
_PATCHES = 4  # of an image token
_PATCH_VALUES = 1536  # 3 channels, 2 frames, 16 x 16 pixels


@dataclass(frozen=True, slots=True)
class LedgerJob:
    """A checkpoint ``folder`` and its settings.

    ``read_files``: read weights from files instead of making them on the GPU. ``rounded``: embedding, head
    and tower are in int8, and int4 has groups of 128. ``tight``: the smaller of the plan's two KV pools.
    ``device`` is other than ``cuda`` only in tests.
    """

    folder: str
    size: str
    weights: str
    context: int
    image_tokens: int
    sequences: int
    chunk: int
    backend: str = NATIVE
    read_files: bool = False
    device: str = "cuda"
    rounded: bool = False
    tight: bool = False

    @property
    def name(self) -> str:
        """``2B-fp8-c4096-i1024-s2-p512``, for the table and for ``--only``."""
        pool = "-tight" if self.tight else ""
        chunk = f"-p{self.chunk}{pool}" if self.backend == NATIVE else "-transformers"
        weights = self.weights + (ROUNDED if self.rounded else "")
        return f"{self.size}-{weights}-c{self.context}-i{self.image_tokens}-s{self.sequences}{chunk}"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What a process held on the device, in bytes.

    ``process``: memory in use on the GPU beyond what was before the process came (NVML). ``own``: what NVML
    lists for it, None if it does not. ``reserved`` and ``reserved_loaded``: torch's pool at the end and after
    loading; ``peak`` and ``loaded``: live tensors, at most and after loading. ``bare_context``: the process
    right after CUDA has started. ``workspace``: of the pool, for torch's own matrix products. ``lines``:
    bytes of tensors by ledger line. ``reached``: sizes of the worst case. ``seconds``: by phase.
    ``table_in_ram``: an untied embedding was in RAM, which no engine did before 2026-11-23.
    """

    process: int
    own: int | None
    reserved: int
    reserved_loaded: int
    peak: int
    loaded: int
    bare_context: int
    workspace: int
    lines: dict[str, int]
    reached: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    table_in_ram: bool = False


def main() -> None:
    job = LedgerJob(**json.loads(sys.argv[1]))
    run_native(job) if job.backend == NATIVE else run_transformers(job)


def wait_for_start() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("stdin ended before the line that starts the job")


def report(held: HeldMemory) -> None:
    print(json.dumps(asdict(held)), flush=True)


# --- the native engine -------------------------------------------------------------------------------------


def run_native(job: LedgerJob) -> None:
    import torch

    from vlfit.engine.device import choose_device
    from vlfit.engine.execution import warmup

    wait_for_start()
    started = time.perf_counter()
    meter = GpuMeter()
    choose_device(job.device)  # starts CUDA, with the engine's own limits
    torch.cuda.synchronize()
    bare = meter.growth() - torch.cuda.memory_reserved()
    ready = time.perf_counter()
    engine = load(job)
    torch.cuda.synchronize()
    loaded, reserved_loaded = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    at_load = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    reached = warmup.run_worst_case(engine, job.image_tokens)
    warmup.warm_up_kernels(engine)  # as a server does: every kernel is loaded then
    torch.cuda.synchronize()
    ended = time.perf_counter()
    process, own, reserved = meter.growth(), meter.of_process(), torch.cuda.memory_reserved()
    report(
        HeldMemory(
            process=process,
            own=own,
            reserved=reserved,
            reserved_loaded=reserved_loaded,
            peak=torch.cuda.max_memory_allocated(),
            loaded=loaded,
            bare_context=bare,
            workspace=gemm_workspace(),
            lines=bytes_by_line(engine),
            reached=asdict(reached),
            seconds={"start": ready - started, "load": at_load - ready, "run": ended - at_load},
            table_in_ram=engine.table_in_ram,
        )
    )


def load(job: LedgerJob) -> "NativeEngine":
    from vlfit.api.engine_options import EngineOptions
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.loading.loader import Loader
    from vlfit.plan.native.cost import TIGHT_REQUEST, kv_tokens
    from vlfit.tuning.calibration_run import RandomWeightsLoader

    options = EngineOptions(
        device=job.device,
        max_model_len=job.context,
        max_num_seqs=job.sequences,
        max_num_batched_tokens=job.chunk,
        image_tokens=job.image_tokens,
        kv_tokens=kv_tokens(job.context, job.sequences, TIGHT_REQUEST) if job.tight else None,
    )
    loader = Loader if job.read_files else RandomWeightsLoader
    return NativeEngine(open_checkpoint(Path(job.folder)), options, None, loader)


def bytes_by_line(engine: "NativeEngine") -> dict[str, int]:
    """Bytes that the engine holds, by ledger line."""
    memory = engine.account().memory
    found = {**memory.weights, "kv_cache": memory.kv_cache, "graphs": memory.cuda_graphs}
    if memory.state_cache:
        found["state_cache"] = memory.state_cache
    return found


def gemm_workspace() -> int:
    """Free the part of torch's pool that its own matrix products took; its size."""
    import torch

    if not torch.cuda.is_available():
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


# --- transformers ------------------------------------------------------------------------------------------


def run_transformers(job: LedgerJob) -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    from vlfit.tuning.calibration_run import measure_workspace_bytes

    wait_for_start()
    started = time.perf_counter()
    meter = GpuMeter()
    torch.empty(1, device=job.device)
    torch.cuda.synchronize()
    bare = meter.growth() - torch.cuda.memory_reserved()
    workspace = measure_workspace_bytes(torch.device(job.device))
    ready = time.perf_counter()
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(job.folder, dtype=torch.bfloat16)
    model = model.to(job.device).eval()
    torch.cuda.synchronize()
    loaded, reserved_loaded = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    at_load = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    inputs = full_batch(job, model.config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    output = model.generate(**inputs, max_new_tokens=_ANSWER, do_sample=False)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    report(
        HeldMemory(
            process=meter.growth(),
            own=meter.of_process(),
            reserved=torch.cuda.memory_reserved(),
            reserved_loaded=reserved_loaded,
            peak=torch.cuda.max_memory_allocated(),
            loaded=loaded,
            bare_context=bare,
            workspace=workspace,
            lines=parameter_bytes(model),
            reached={
                "max_length": int(output.shape[1]),
                "image_tokens": job.image_tokens,
                "sequences": len(output),
            },
            seconds={"start": ready - started, "load": at_load - ready, "run": ended - at_load},
        )
    )


def full_batch(job: LedgerJob, config: Any) -> dict[str, Any]:
    """Prompts that fill the context up to the answer, each with one picture, as the processor makes them."""
    import torch

    rows = next(rows for rows in range(int(job.image_tokens**0.5), 0, -1) if job.image_tokens % rows == 0)
    columns = job.image_tokens // rows
    length = job.context - _ANSWER
    prompt = torch.full((length,), _FILLER)
    prompt[0] = config.vision_start_token_id
    prompt[1 : 1 + job.image_tokens] = config.image_token_id
    prompt[1 + job.image_tokens] = config.vision_end_token_id
    ids = prompt.repeat(job.sequences, 1).to(job.device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.zeros(job.sequences * job.image_tokens * _PATCHES, _PATCH_VALUES).to(
            job.device
        ),
        "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]] * job.sequences).to(job.device),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def parameter_bytes(model: Any) -> dict[str, int]:
    """Bytes of the parameters by ledger line. The KV cache is allocated and freed all the time."""
    sizes = {"weights.text": 0, "weights.vision": 0, "weights.embedding": 0}
    for name, parameter in model.named_parameters():
        vocabulary = "embed_tokens" in name or "lm_head" in name
        line = "vision" if ".visual." in f".{name}" else "embedding" if vocabulary else "text"
        sizes[f"weights.{line}"] += parameter.nbytes
    return sizes


if __name__ == "__main__":
    main()
