"""One process with one engine in it, so that import time and memory are that engine's own.

    python -m benchmarks.engine_workers native|transformers JOB      prints an ``EngineRun`` as JSON

``benchmarks.engine`` and ``benchmarks.sizes`` start it. Engines are imported late: that time is measured.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import process_memory, run_worker, versions_of
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.bench.measure import RequestPhases, TimedRequest, run_requests

if TYPE_CHECKING:
    from vlfit.backends.native import NativeBackend

NATIVE, TRANSFORMERS = "native", "transformers"
IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One checkpoint, one picture and question; ``rounds`` times over, after one that warms up."""

    folder: str
    picture: str
    question: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    tokens: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Measurements of one worker. Memory in bytes; ``gpu_bytes``: the peak in torch's allocator.

    ``read_bytes``: of weights for each token, where the engine reports it, else 0.
    """

    engine: str
    import_s: float
    load_s: float
    rounds: list[RequestPhases]
    token_ids: list[int]
    prompt_tokens: int
    image_tokens: int
    rss_loaded: int
    rss_peak: int
    gpu_bytes: int = 0
    read_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def median_s(self, phase: str) -> float:
        """Median seconds of ``preprocess``, ``prefill`` or ``decode``."""
        return float(statistics.median(getattr(each, f"{phase}_s") for each in self.rounds))


def run_engine(engine: str, job: EngineJob) -> EngineRun:
    """Run a worker to its end. Raises ``RuntimeError`` with its stderr if it fails."""
    threads = str(job.threads)
    result = run_worker(
        "benchmarks.engine_workers",
        engine,
        json.dumps(asdict(job)),
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
    )
    result["rounds"] = [RequestPhases(**each) for each in result["rounds"]]
    return EngineRun(**result)


def main() -> None:
    job = EngineJob(**json.loads(sys.argv[2]))
    run = native(job) if sys.argv[1] == NATIVE else transformers(job)
    print(json.dumps(asdict(run)))


# --- vlfit -------------------------------------------------------------------------------------------------


def native(job: EngineJob) -> EngineRun:
    """The native engine with its defaults, but without caches and drafts: every round does all the work."""
    started = time.perf_counter()
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.in_process import import_engine
    from vlfit.backends.native import NativeBackend

    import_engine()  # at once: it counts as import time
    import torch

    imported = time.perf_counter()
    from vlfit.tuning.timing import step_bytes

    torch.set_num_threads(job.threads)
    options = EngineOptions(
        device=job.device, dtype=job.dtype, image_cache_bytes=0, prefix_cache=False, speculate=False
    )
    backend = NativeBackend.load(job.folder, options)
    if job.device != "cpu":
        torch.cuda.synchronize()
    loaded = time.perf_counter()
    rss_loaded = process_memory("VmRSS")
    with backend:
        # The first round warms up; its token ids are compared.
        first = answer(backend, job, with_ids=True)
        rounds = [answer(backend, job, with_ids=False).phases for _ in range(job.rounds)]
        read = step_bytes(backend.engine)
    return EngineRun(
        engine=NATIVE,
        import_s=imported - started,
        load_s=loaded - imported,
        rounds=rounds,
        token_ids=list(first.token_ids),
        prompt_tokens=first.prompt_tokens,
        image_tokens=first.image_tokens,
        rss_loaded=rss_loaded,
        rss_peak=process_memory("VmHWM"),
        gpu_bytes=torch.cuda.max_memory_allocated() if job.device != "cpu" else 0,
        read_bytes=read.weights if read is not None else 0,
        versions=versions_of("torch", "tokenizers", "pillow"),
    )


def answer(backend: "NativeBackend", job: EngineJob, *, with_ids: bool) -> TimedRequest:
    """One request; ``with_ids`` asks for logprobs, which bring the token ids."""
    sampling = SamplingParams(max_tokens=job.tokens, ignore_eos=True, top_logprobs=0 if with_ids else None)
    conversation = single_turn(job.question, ImagePart(Path(job.picture).read_bytes()))
    [timed] = run_requests(backend, [conversation], sampling)
    return timed


# --- transformers ------------------------------------------------------------------------------------------


class TokenClock:
    """A streamer for ``generate`` that takes the time of each token. The first ``put`` is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.token_ids: list[int] = []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times.append(time.perf_counter())
        self.token_ids.extend(int(token) for token in value.reshape(-1))

    def end(self) -> None:
        """Part of a streamer's interface."""


def transformers(job: EngineJob) -> EngineRun:
    """transformers' ``generate``, the reference."""
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    imported = time.perf_counter()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(job.folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(job.folder, dtype=getattr(torch, job.dtype))
    model = model.to(job.device).eval()
    # No end token: every round decodes the same number of tokens, whatever the model says.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    loaded = time.perf_counter()
    rss_loaded = process_memory("VmRSS")

    rounds: list[RequestPhases] = []
    for _ in range(job.rounds + 1):
        inputs, image_tokens, preprocess_s = prepare(job, tokenizer, image_processor, torch)
        clock = TokenClock()
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=job.tokens, do_sample=False, streamer=clock)
        rounds.append(RequestPhases(preprocess_s, clock.times[0] - start, clock.times[-1] - clock.times[0]))
    return EngineRun(
        engine=TRANSFORMERS,
        import_s=imported - started,
        load_s=loaded - imported,
        rounds=rounds[1:],
        token_ids=clock.token_ids,
        prompt_tokens=int(inputs["input_ids"].shape[1]),
        image_tokens=image_tokens,
        rss_loaded=rss_loaded,
        rss_peak=process_memory("VmHWM"),
        gpu_bytes=torch.cuda.max_memory_allocated() if job.device != "cpu" else 0,
        versions=versions_of("torch", "transformers", "tokenizers", "pillow"),
    )


def prepare(
    job: EngineJob, tokenizer: Any, image_processor: Any, torch: Any
) -> tuple[dict[str, Any], int, float]:
    """The file and the question as tensors on the device, the picture's tokens, and the seconds that took.

    These are the steps of transformers' own processor, which needs torchvision for videos: decode, resize,
    patchify, render the template, repeat the placeholder, tokenize.
    """
    from PIL import Image

    start = time.perf_counter()
    picture = Image.open(Path(job.picture)).convert("RGB")
    pixels = image_processor(images=[picture], return_tensors="pt")
    image_tokens = int(pixels["image_grid_thw"].prod()) // image_processor.merge_size**2
    content = [{"type": "image"}, {"type": "text", "text": job.question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace(IMAGE_TOKEN, IMAGE_TOKEN * image_tokens)
    encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    is_picture = encoded["input_ids"] == tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    inputs = {**encoded, **pixels, "mm_token_type_ids": is_picture.int()}
    inputs = {name: tensor.to(job.device) for name, tensor in inputs.items()}
    if job.device != "cpu":
        torch.cuda.synchronize()
    return inputs, image_tokens, time.perf_counter() - start


if __name__ == "__main__":
    main()
