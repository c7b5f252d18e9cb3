"""One process that loads a checkpoint with layers in RAM, answers a few times, and says how long it took."""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine


@dataclass(frozen=True, slots=True)
class OffloadJob:
    """A checkpoint ``folder`` with ``offload`` bytes off the card, asked about a picture ``rounds`` times.

    ``variant``: what is done otherwise than the engine does it, "" for nothing.
    """

    folder: str
    offload: int
    image_tokens: int
    tokens: int
    rounds: int
    device: str = "cuda"
    variant: str = ""
    context: int = 4096
    chunk: int = 2048

    @property
    def title(self) -> str:
        size = f"{self.offload / 2**30:g} GiB"
        return f"{size}, {self.variant}" if self.variant else size


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of all rounds but the first: tokens per second after the first token, seconds of a decode step
    and to the first token. ``weights`` on the device by ledger line, ``ram`` locked, ``peak`` more bytes than
    in the end on the device while loading.
    """

    layers: int
    ram: int
    weights: dict[str, int]
    load_s: float
    peak: int
    tokens_per_s: float
    step_s: float
    first_token_s: float


def main() -> None:
    import torch

    from vlfit.api.engine_options import EngineOptions
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.engine.engine import NativeEngine
    from vlfit.loading.offload import StreamedLayers

    job = OffloadJob(**json.loads(sys.argv[1]))
    change(job.variant)
    options = EngineOptions(
        device=job.device,
        max_model_len=job.context,
        max_num_seqs=1,
        max_num_batched_tokens=job.chunk,
        image_tokens=job.image_tokens,
        image_cache_bytes=0,
        prefix_cache=False,
        speculate=False,
        offload=job.offload or None,
        cuda_graphs=job.variant != "without graphs",
    )
    began = time.perf_counter()
    engine = NativeEngine(open_checkpoint(job.folder), options)
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    load_s = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if on_gpu else 0
    rounds = [ask(engine, job, number) for number in range(job.rounds)][1:]
    first, step = (statistics.median(times[which] for times in rounds) for which in (0, 1))
    layers = engine.runner.text.layers
    ram = layers.offloaded_bytes if isinstance(layers, StreamedLayers) else 0
    account = engine.account()
    found = Measured(
        account.settings.offload, ram, account.memory.weights, load_s, peak, 1 / step, step, first
    )
    print(json.dumps(asdict(found)))


def change(variant: str) -> None:
    """Do what was decided against, so that the difference can be seen."""
    from vlfit.loading import offload as streaming
    from vlfit.plan.native import ram as planning

    if variant == "last layers":
        planning.spread_layers = lambda layers, count: tuple(range(layers - count, layers))
    elif variant == "one piece":
        streaming.PIECE = 2**40
    elif variant == "pieces of 1 MiB":
        streaming.PIECE = 2**20


def ask(engine: "NativeEngine", job: OffloadJob, number: int) -> tuple[float, float]:
    """Seconds to the first token, and of each step after it: a question of 40 tokens about a picture."""
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.engine.execution.warmup import image_prompt
    from vlfit.plan.speed import TEXT_TOKENS

    prompt = image_prompt(engine, job.image_tokens, number, job.image_tokens + TEXT_TOKENS)
    times: list[float] = []
    failures: list[Exception] = []

    def listen(arrival: object) -> None:
        times.append(time.perf_counter())
        if isinstance(arrival, Exception):
            failures.append(arrival)

    sampling = SamplingParams(max_tokens=job.tokens, ignore_eos=True)
    began = time.perf_counter()
    engine.submit(engine.sequence(replace(engine.prepare_prompt(prompt), keys=None), sampling, listen))
    while engine.busy:
        engine.step()
    if failures:
        raise failures[0]
    # Chunks without text may be held back, so the end of the last step is what counts.
    return times[0] - began, (times[-1] - times[0]) / (job.tokens - 1)


if __name__ == "__main__":
    main()
