"""What keeping to a form costs an answer on a GPU, for each token.

    python -m benchmarks.forms 2B-bf16 4B-int4

On hollow checkpoints of the true sizes, one request at a time: what is said does not matter here. The form
stands in for llguidance's: it takes the host as long as that does (``benchmarks/constraint.py`` measures it),
and forbids the model's own token never, once in ten times, every other time or always. A hundredth is what
the clock is good for; what must hold is that no answer is more than a tenth slower. The exit code is 1 if one
is.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.facts import card, commit
from benchmarks.hollow import write_hollow
from benchmarks.report import print_rows
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import text_prompt
from vlfit.engine.sampling.grammar import TOKENS_PER_WORD, Bitmask

MOST = 1.10
TOKENS, FIRST, ROUNDS, PROMPT = 150, 5, 5, 500
MASK_SECONDS, TAKE_SECONDS = 30e-6, 5e-6
HOW = {"greedy": SamplingParams(), "drawn": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=1)}
FORBIDS = {"never": 0, "1 of 10": 10, "1 of 2": 2, "always": 1}


class Stand:
    """A form that forbids the newest token to come again, every ``often`` times; 0: never."""

    def __init__(self, vocabulary: int, often: int) -> None:
        self._all: Bitmask = np.full(-(-vocabulary // TOKENS_PER_WORD), 0xFFFFFFFF, dtype=np.uint32)
        self._often, self._asked = often, 0
        self._newest = 0
        self._bits: Bitmask | None = None

    def bits(self) -> Bitmask:
        if self._bits is None:
            _busy(MASK_SECONDS)
            self._asked += 1
            self._bits = self._all.copy()
            if self._often and self._asked % self._often == 0:
                # A hollow model says the same again and again: its own token is the newest one.
                self._bits[self._newest // TOKENS_PER_WORD] &= ~np.uint32(1 << self._newest % TOKENS_PER_WORD)
        return self._bits

    def allows(self, token_id: int) -> bool:
        return bool(self.bits()[token_id // TOKENS_PER_WORD] >> np.uint32(token_id % TOKENS_PER_WORD) & 1)

    def allowed(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.unpackbits(self.bits().view(np.uint8), bitorder="little")[:vocabulary].astype(np.bool_)

    def take(self, token_id: int) -> None:
        _busy(TAKE_SECONDS)
        self._newest, self._bits = token_id, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="SIZE-FORMAT", help="2B-bf16, 4B-fp8, ...")
    print(f"commit {commit()}; {card()}\n")
    rows, worst = [["model", "tokens are", "no form, ms", *FORBIDS]], 0.0
    for name in parser.parse_args().models:
        size, _, weights = name.partition("-")
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_checkpoint(write_hollow(Path(folder) / name, size, weights))
            engine = NativeEngine(
                checkpoint, EngineOptions(device="cuda", max_model_len=2048, max_num_seqs=1)
            )
            for how, sampling in HOW.items():
                found = measure(engine, sampling)
                plain = found.pop("no form")
                worst = max(worst, *(each / plain for each in found.values()))
                ratios = [f"{(each / plain - 1) * 100:+.1f} %" for each in found.values()]
                rows.append([name, how, f"{plain:.3f}", *ratios])
            del engine
    print_rows(rows)
    print(f"\nat most {worst:.2f} times as long with a form: {'ok' if worst <= MOST else 'WRONG'}")
    sys.exit(worst > MOST)


def measure(engine: NativeEngine, sampling: SamplingParams) -> dict[str, float]:
    """Milliseconds a token: the median of rounds in which each kind has its turn."""
    vocabulary = engine.runner.text.vocabulary
    answer(engine, sampling, None)
    seconds: dict[str, list[float]] = {name: [] for name in ("no form", *FORBIDS)}
    for _ in range(ROUNDS):
        seconds["no form"].append(answer(engine, sampling, None))
        for name, often in FORBIDS.items():
            seconds[name].append(answer(engine, sampling, Stand(vocabulary, often)))
    return {name: statistics.median(each) * 1e3 for name, each in seconds.items()}


def answer(engine: NativeEngine, sampling: SamplingParams, form: Stand | None) -> float:
    """Seconds a token of one answer, behind its first ones."""
    wish = SamplingParams(
        max_tokens=TOKENS,
        ignore_eos=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
    )
    sequence = engine.sequence(engine.prepare_prompt(text_prompt(PROMPT)), wish, lambda _: None)
    sequence.proposer = None
    sequence.grammar_matcher = form  # type: ignore[assignment]
    engine.submit(sequence)
    while len(sequence.generated) < FIRST:
        engine.step()
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return (time.perf_counter() - began) / (TOKENS - FIRST)


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
