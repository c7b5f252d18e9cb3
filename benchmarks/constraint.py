"""What keeping an answer to a form costs the host for each token: ``python -m benchmarks.constraint``.

    python -m benchmarks.constraint                         mini's vocabulary
    python -m benchmarks.constraint --model FOLDER          that of a checkpoint
    python -m benchmarks.constraint --ranks qwen.tiktoken   that of a file of tiktoken's kind: Qwen's own
                                                            comes with the package dashscope

Prints microseconds, the median and the most: to check the model's own token, to compute a mask where that is
not allowed, and to go on. Nothing runs on a model: the answers are given.
"""

import argparse
import base64
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.sampling.grammar import SLICES, SPACING, llguidance_tokenizer
from vlfit.prompt.tokenizer import read_tokenizer

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


class Ranks:
    """A vocabulary of tiktoken's kind: a line for each token, its bytes in base64 and its number."""

    bos_token_id = None

    def __init__(self, path: Path) -> None:
        self.tokens = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]
        self.eos_token_id = len(self.tokens)
        self.special_token_ids = [self.eos_token_id]
        self.tokens.append(b"<|im_end|>")
        self._numbers = {token: number for number, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest token at each place: near enough to where a tokenizer would cut."""
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            size = next(size for size in range(self._longest, 0, -1) if rest[:size] in self._numbers)
            ids.append(self._numbers[rest[:size]])
            rest = rest[size:]
        return ids


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--ranks", type=Path)
    wishes = parser.parse_args()
    began = time.perf_counter()
    if wishes.ranks is not None:
        words = Ranks(wishes.ranks)
        vocabulary = LLTokenizer(TokenizerWrapper(words), eos_token=words.eos_token_id, slices=SLICES)
    else:
        tokenizer = read_tokenizer(open_checkpoint(wishes.model).folder)
        vocabulary = llguidance_tokenizer(tokenizer, tokenizer.get_vocab_size() - 1)
    print(f"{vocabulary.vocab_size:,} tokens, read in {time.perf_counter() - began:.2f} s (once)")
    text = json.dumps(ANSWER, ensure_ascii=False)
    for name, schema in (("a schema", SCHEMA), ("any object", {"type": "object"})):
        _measure(name, vocabulary, schema, vocabulary.greedy_tokenize(text))


def _measure(name: str, vocabulary: LLTokenizer, schema: dict[str, Any], token_ids: list[int]) -> None:
    began = time.perf_counter()
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema, SPACING))
    compiled = (time.perf_counter() - began) * 1e3
    spent: dict[str, list[float]] = {"check": [], "mask": [], "go on": []}
    for token_id in token_ids:
        steps: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("check", partial(matcher.validate_tokens, [token_id])),
            ("mask", matcher.compute_bitmask),
            ("go on", partial(matcher.consume_token, token_id)),
        )
        for step, do in steps:
            begun = time.perf_counter()
            do()
            spent[step].append((time.perf_counter() - begun) * 1e6)
    if not matcher.is_accepting():
        raise SystemExit(f"{name}: the answer did not follow its schema: {matcher.get_error()[:200]}")
    told = ", ".join(
        f"{step} {statistics.median(each):.0f} (most {max(each):.0f})" for step, each in spent.items()
    )
    print(f"{name}: read in {compiled:.1f} ms; of {len(token_ids)} tokens, microseconds: {told}")


if __name__ == "__main__":
    main()
