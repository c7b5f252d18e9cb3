"""One process that answers with vlfit's native engine, in the settings a person gets, except that the cache
of encoded pictures is off: every round must look at the picture again.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import (
    Job,
    Run,
    memory_of_this_process,
    print_run,
    read_job,
    versions_of,
)
from vlfit.api.conversation import ImagePart, ask
from vlfit.api.sampling_params import SamplingParams
from vlfit.bench.measure import TimedRequest, run_requests

if TYPE_CHECKING:
    from vlfit.backends.native import NativeBackend


def main() -> None:
    job = read_job()
    started = time.perf_counter()
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.native import NativeBackend, import_engine

    import_engine()  # NativeBackend does it late; here it counts as import time
    import torch

    imported = time.perf_counter()
    from vlfit.tuning.timing import step_bytes

    torch.set_num_threads(job.threads)
    # Every round asks the same: without these all but the first would be remembered.
    options = EngineOptions(
        device=job.device, dtype=job.dtype, image_cache_bytes=0, prefix_cache=False, speculate=False
    )
    backend = NativeBackend.load(job.folder, options)
    if job.device != "cpu":
        torch.cuda.synchronize()
    loaded = time.perf_counter()
    rss_loaded = memory_of_this_process("VmRSS")
    with backend:
        # The first round warms up, and is the one that is asked for its token ids.
        first = answer(backend, job, with_ids=True)
        rounds = [answer(backend, job, with_ids=False).timings for _ in range(job.rounds)]
        read = step_bytes(backend.engine)
    print_run(
        Run(
            engine="native",
            import_s=imported - started,
            load_s=loaded - imported,
            rounds=rounds,
            token_ids=list(first.token_ids),
            prompt_tokens=first.prompt_tokens,
            image_tokens=first.image_tokens,
            rss_loaded=rss_loaded,
            rss_peak=memory_of_this_process("VmHWM"),
            gpu_bytes=torch.cuda.max_memory_allocated() if job.device != "cpu" else 0,
            read_bytes=read.weights if read is not None else 0,
            versions=versions_of("torch", "tokenizers", "pillow"),
        )
    )


def answer(backend: "NativeBackend", job: Job, *, with_ids: bool) -> TimedRequest:
    """One request, with its token ids if they are asked for."""
    sampling = SamplingParams(max_tokens=job.tokens, ignore_eos=True, top_logprobs=0 if with_ids else None)
    conversation = ask(job.question, ImagePart(Path(job.picture).read_bytes()))
    [heard] = run_requests(backend, [conversation], sampling)
    return heard


if __name__ == "__main__":
    main()
