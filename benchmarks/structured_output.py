"""Cost of structured output for each token: of llguidance on the host, and of grammars in the engine on a
GPU.

    python -m benchmarks.structured_output                          host, mini's vocabulary: seconds
    python -m benchmarks.structured_output --model FOLDER           host, a checkpoint's vocabulary
    python -m benchmarks.structured_output --ranks qwen.tiktoken    host, a vocabulary in tiktoken's format:
                                                                    Qwen's comes with the package dashscope
    python -m benchmarks.structured_output 2B-bf16 4B-int4          engine on a GPU: a minute each

**Host**: microseconds, median and maximum, to check the model's own token, to compute a mask where it is not
allowed, and to advance. The answers are given; no model runs.

**Engine**: sparse checkpoints of the true sizes, one request at a time. A stand-in for llguidance takes as
much time of the host, and forbids the model's own token never, once in ten times, every other time or always.
The clock is good for one per cent. Exit code 1 if an answer is more than a tenth slower than without a
grammar.
"""

import base64
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import argument_parser, card, commit, print_table, require_gpu
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SPACING, SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.sampling.grammar import (
    SLICES,
    TOKENS_PER_WORD,
    Bitmask,
    GrammarMatcher,
    llguidance_tokenizer,
)
from vlfit.prompt.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "number": {"type": "integer", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "inside": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "words": {"type": "string"}},
            "required": ["x", "words"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "number", "tags", "inside"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "A red circle on a white table with ümlauts",
    "number": 512,
    "tags": ["red", "blue"],
    "inside": {"x": -1.25e3, "words": "some words that are longer than a few, and so on"},
}
MAX_RATIO = 1.10
TOKENS, FIRST, ROUNDS, PROMPT = 150, 5, 5, 500
MASK_SECONDS, ACCEPT_SECONDS = 30e-6, 5e-6  # of llguidance, as the first part measures them
SAMPLING = {"greedy": SamplingParams(), "drawn": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=1)}
FORBIDDEN = {"never": 0, "1 of 10": 10, "1 of 2": 2, "always": 1}
NO_GRAMMAR = "no grammar"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", metavar="SIZE-FORMAT", help="measure the engine on a GPU")
    parser.add_argument("--model", default="mini", help="whose vocabulary llguidance gets")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="a vocabulary in tiktoken's format")
    options = parser.parse_args()
    if options.checkpoints:
        measure_engine(options.checkpoints)
    else:
        measure_host(options.model, options.ranks)


# --- llguidance on the host --------------------------------------------------------------------------------


class TiktokenVocabulary:
    """A vocabulary in tiktoken's format: a line for each token, with its bytes in base64 and its id."""

    bos_token_id = None

    def __init__(self, path: Path) -> None:
        self.tokens = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]
        self.eos_token_id = len(self.tokens)
        self.special_token_ids = [self.eos_token_id]
        self.tokens.append(b"<|im_end|>")
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize by longest match, which is close to what a tokenizer does."""
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            size = next(size for size in range(self._longest, 0, -1) if rest[:size] in self._ids)
            ids.append(self._ids[rest[:size]])
            rest = rest[size:]
        return ids


def measure_host(model: str, ranks: Path | None) -> None:
    began = time.perf_counter()
    if ranks is not None:
        words = TiktokenVocabulary(ranks)
        vocabulary = LLTokenizer(TokenizerWrapper(words), eos_token=words.eos_token_id, slices=SLICES)
    else:
        checkpoint = open_checkpoint(model)
        tokenizer = read_tokenizer(checkpoint.folder, checkpoint.model_type)
        vocabulary = llguidance_tokenizer(tokenizer, tokenizer.get_vocab_size() - 1)
    print(f"{vocabulary.vocab_size:,} tokens, read in {time.perf_counter() - began:.2f} s (once)")
    text = json.dumps(ANSWER, ensure_ascii=False)
    for name, schema in (("a schema", SCHEMA), ("any object", {"type": "object"})):
        measure_matcher(name, vocabulary, schema, vocabulary.greedy_tokenize(text))


def measure_matcher(name: str, vocabulary: LLTokenizer, schema: dict[str, Any], token_ids: list[int]) -> None:
    began = time.perf_counter()
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema, SPACING))
    compile_ms = (time.perf_counter() - began) * 1e3
    microseconds: dict[str, list[float]] = {"check": [], "mask": [], "advance": []}
    for token_id in token_ids:
        steps: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("check", partial(matcher.validate_tokens, [token_id])),
            ("mask", matcher.compute_bitmask),
            ("advance", partial(matcher.consume_token, token_id)),
        )
        for step, call in steps:
            start = time.perf_counter()
            call()
            microseconds[step].append((time.perf_counter() - start) * 1e6)
    if not matcher.is_accepting():
        sys.exit(f"{name}: the answer did not follow its schema: {matcher.get_error()[:200]}")
    summary = ", ".join(
        f"{step} {statistics.median(each):.0f} (at most {max(each):.0f})"
        for step, each in microseconds.items()
    )
    print(f"{name}: compiled in {compile_ms:.1f} ms; of {len(token_ids)} tokens, microseconds: {summary}")


# --- the engine on a GPU -----------------------------------------------------------------------------------


class StandInMatcher(GrammarMatcher):
    """Takes llguidance's time, and forbids every ``forbid_every``-th time the token that came last (0:
    never).

    A sparse checkpoint gives the same token again and again, so that is the model's own.
    """

    def __init__(self, vocabulary: int, forbid_every: int) -> None:
        self._all: Bitmask = np.full(-(-vocabulary // TOKENS_PER_WORD), 0xFFFFFFFF, dtype=np.uint32)
        self._forbid_every, self._masks = forbid_every, 0
        self._last = 0
        self._bitmask = None

    def bitmask(self) -> Bitmask:
        return self._current_bitmask()

    def _current_bitmask(self) -> Bitmask:
        if self._bitmask is None:
            _spin(MASK_SECONDS)
            self._masks += 1
            self._bitmask = self._all.copy()
            if self._forbid_every and self._masks % self._forbid_every == 0:
                self._bitmask[self._last // TOKENS_PER_WORD] &= ~np.uint32(1 << self._last % TOKENS_PER_WORD)
        return self._bitmask

    def accept_token(self, token_id: int) -> None:
        _spin(ACCEPT_SECONDS)
        self._last, self._bitmask = token_id, None


def measure_engine(names: list[str]) -> None:
    from vlfit.engine.engine import NativeEngine

    require_gpu("structured_output")
    print(f"commit {commit()}; {card()}\n")
    rows, worst = [["model", "tokens are", f"{NO_GRAMMAR}, ms", *FORBIDDEN]], 0.0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_checkpoint(checkpoint_of(name, Path(folder)))
            options = EngineOptions(device="cuda", max_model_len=2048, max_num_seqs=1)
            engine = NativeEngine(checkpoint, options)
            for how, sampling in SAMPLING.items():
                medians = milliseconds_per_token(engine, sampling)
                plain = medians.pop(NO_GRAMMAR)
                worst = max(worst, *(each / plain for each in medians.values()))
                ratios = [f"{(each / plain - 1) * 100:+.1f} %" for each in medians.values()]
                rows.append([name, how, f"{plain:.3f}", *ratios])
            del engine
    print_table(rows)
    print(f"\nat most {worst:.2f} times as long with a grammar: {'ok' if worst <= MAX_RATIO else 'WRONG'}")
    sys.exit(worst > MAX_RATIO)


def milliseconds_per_token(engine: "NativeEngine", sampling: SamplingParams) -> dict[str, float]:
    """Medians of rounds in which each grammar has its turn."""
    vocabulary = engine.runner.text.vocabulary
    time_answer(engine, sampling, None)
    seconds: dict[str, list[float]] = {name: [] for name in (NO_GRAMMAR, *FORBIDDEN)}
    for _ in range(ROUNDS):
        seconds[NO_GRAMMAR].append(time_answer(engine, sampling, None))
        for name, forbid_every in FORBIDDEN.items():
            matcher = StandInMatcher(vocabulary, forbid_every)
            seconds[name].append(time_answer(engine, sampling, matcher))
    return {name: statistics.median(each) * 1e3 for name, each in seconds.items()}


def time_answer(engine: "NativeEngine", sampling: SamplingParams, matcher: GrammarMatcher | None) -> float:
    """Seconds per token of one answer, after its first tokens."""
    from vlfit.engine.execution.warmup import text_prompt

    params = replace(sampling, max_tokens=TOKENS, ignore_eos=True)
    sequence = engine.make_sequence(engine.prepare_prompt(text_prompt(PROMPT)), params, lambda _: None)
    sequence.proposer = None
    sequence.grammar_matcher = matcher
    engine.submit(sequence)
    while len(sequence.generated) < FIRST:
        engine.step()
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return (time.perf_counter() - began) / (TOKENS - FIRST)


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
