"""What a recorded pass with guesses takes on a GPU, against a decode step of one row.

    python -m benchmarks.guess_rows 2B-fp8 4B-fp8 4B-int4

On hollow checkpoints of the true sizes: what is said does not matter here, and time does not depend on it.
``on the card``: recordings replayed one behind the other. ``waited``: a pass is launched and its tokens are
read, as with guesses it must be; a plain step is launched before the last token is read, so that its time on
the card is all that it takes. What that ratio is above one, guesses must come true for.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.facts import card, commit
from benchmarks.hollow import write_hollow
from benchmarks.report import print_rows
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.cuda_graphs import CapturedStep, DecodeGraphs
from vlfit.engine.execution.warmup import text_prompt
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.kernels.attention.paged import BlockAttentionMetadata

ROUNDS, WARM_UP = 60, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-bf16, 4B-fp8, ...")
    parser.add_argument("--rows", default="2,4,8", help="of a pass with guesses, one line for each")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens before the answer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.guess_rows needs a CUDA device")
    print(f"commit {commit()}; {card()}; behind a prompt of {options.prompt} tokens\n")
    rows = [["model", "rows", "plain step, ms", "on the card, ms", "ratio", "waited, ms", "ratio"]]
    for model in options.models:
        size, _, weights = model.partition("-")
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_checkpoint(write_hollow(Path(folder) / model, size, weights))
            wishes = EngineOptions(device="cuda", max_model_len=2048, max_num_seqs=1, speculate=False)
            engine = NativeEngine(checkpoint, wishes)
        sequence = begun(engine, options.prompt)
        for count in map(int, options.rows.split(",")):
            with torch.inference_mode():
                rows.append([model, str(count), *measure(engine, sequence, count)])
    print_rows(rows)


def begun(engine: NativeEngine, prompt: int) -> Sequence:
    """A request that has begun to decode, and says nothing more by itself."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    sequence = engine.sequence(engine.prepare_prompt(text_prompt(prompt)), sampling, lambda _: None)
    engine.submit(sequence)
    while len(sequence.generated) < 3:
        engine.step()
    return sequence


def measure(engine: NativeEngine, sequence: Sequence, count: int) -> list[str]:
    runner = engine.runner

    def step(token_ids: Tensor, positions: Tensor, plan: BlockAttentionMetadata) -> Tensor:
        return runner.text(token_ids, positions, None, runner.cache, plan, None)

    graphs = DecodeGraphs(step, runner.cache, runner.text.vocabulary, engine.context, 1, count)
    graphs.capture()
    work = [ScheduledChunk(sequence, count, tuple(range(100, 99 + count)))]
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        graphs.run_verify(work).read()
        seconds.append(time.perf_counter() - began)
    waited = statistics.median(seconds[WARM_UP:]) * 1e3
    graphs.run([sequence]).read()
    plain, several = (
        on_the_card(graph) for _, graph in sorted(graphs._captured.items(), key=lambda each: each[0].size)
    )
    ratios = (f"{several / plain:.2f}", f"{waited / plain:.2f}")
    return [f"{plain:.3f}", f"{several:.3f}", ratios[0], f"{waited:.3f}", ratios[1]]


def on_the_card(graph: CapturedStep) -> float:
    """Milliseconds of one replay among many."""

    def replay() -> None:
        graph.forward()
        graph.sample()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP):
        replay()
    begin.record()
    for _ in range(ROUNDS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


if __name__ == "__main__":
    main()
