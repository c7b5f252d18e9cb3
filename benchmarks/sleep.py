"""How long an engine takes to sleep and to wake on this GPU, and what it gives back in between.

    python -m benchmarks.sleep [4B-fp8 8B-int4] [--rounds 3] [--ways] [--json FILE]

Checkpoints are hollow (``hollow.py``), so nothing is downloaded. Device memory is what NVML counts on the
card. Waking ends with the first token of a request about a picture, from the moment it is sent. With
``--ways`` other ways to carry as many bytes to RAM and back are tried (``parking_ways.py``).
"""

import argparse
import json
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engine import write_picture
from benchmarks.facts import card, commit, cpu_name
from benchmarks.hollow import write_hollow
from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB
from benchmarks.parking_ways import Way, all_ways, print_ways
from benchmarks.report import print_rows

if TYPE_CHECKING:
    from vlfit.api.engine_options import SleepLevel
    from vlfit.backends.native import NativeBackend

TOKENS = 16


@dataclass
class Nap:
    """Once asleep and awake again: seconds, and bytes of the card before, asleep and after the request."""

    checkpoint: str
    park: str
    weights: int
    kv_cache: int
    before: int
    asleep: int
    after: int
    sleep_s: float
    wake_s: float
    first_token_s: float
    same_words: bool

    @property
    def share(self) -> float:
        """What was given back, of weights and KV cache."""
        return (self.before - self.asleep) / (self.weights + self.kv_cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", default=["4B-fp8"], metavar="SIZE-FORMAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--ways", action="store_true", help="also other ways to carry as many bytes")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    options = parser.parse_args()
    meter = Meter()
    print(f"commit {commit()}; {card()}; {cpu_name()}; {sys.version.split()[0]}")
    naps: list[Nap] = []
    ways: list[Way] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.checkpoints:
            checkpoint = write_hollow(Path(folder) / name, *name.split("-"))
            found, sizes = naps_of(name, checkpoint, options, meter)
            naps += found
            print_naps(found)
            if options.ways:
                tried = list(all_ways(sizes))
                ways += tried
                print_ways(tried)
    if options.json:
        told = {"commit": commit(), "card": card(), "processor": cpu_name()}
        report = {**told, "naps": [asdict(nap) for nap in naps], "ways": [asdict(way) for way in ways]}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


# --- the engine --------------------------------------------------------------------------------------------


def naps_of(
    name: str, checkpoint: Path, options: argparse.Namespace, meter: Meter
) -> tuple[list[Nap], list[int]]:
    """``rounds`` naps in each place, and the sizes of the storages that wait."""
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.native import NativeBackend

    wishes = EngineOptions(
        device="cuda", max_model_len=options.context, max_num_seqs=options.sequences, enforce_plan=True
    )
    content = write_picture("640x480").read_bytes()
    with NativeBackend.load(checkpoint, wishes) as backend:
        _, words = ask(backend, content)
        sizes = [storage.nbytes() for storage in backend._engine_thread.engine.sleeper._storages()[0]]
        parks: tuple[SleepLevel, ...] = ("ram", "files")
        naps = [
            nap(name, backend, content, words, park, meter) for park in parks for _ in range(options.rounds)
        ]
    return naps, sizes


def nap(
    name: str, backend: "NativeBackend", picture: bytes, words: str, park: "SleepLevel", meter: Meter
) -> Nap:
    held = backend.account().memory
    before = meter.process()
    began = time.perf_counter()
    backend.sleep(park).result()
    asleep_at = time.perf_counter()
    asleep = meter.process()
    first, said = ask(backend, picture)
    # Once more, woken without a request: what of the time is the waking.
    after = meter.process()
    backend.sleep(park).result()
    woken = backend.wake().result().seconds
    return Nap(
        checkpoint=name,
        park=park,
        weights=sum(held.weights.values()),
        kv_cache=held.kv_cache,
        before=before,
        asleep=asleep,
        after=after,
        sleep_s=asleep_at - began,
        wake_s=woken,
        first_token_s=first,
        same_words=said == words,
    )


def ask(backend: "NativeBackend", picture: bytes) -> tuple[float, str]:
    """Seconds to the first token of a request about ``picture``, and its words."""
    from vlfit.api.conversation import ImagePart
    from vlfit.api.conversation import ask as question
    from vlfit.api.outputs import Chunk
    from vlfit.api.sampling_params import SamplingParams

    arrivals: queue.SimpleQueue[tuple[float, Chunk | Exception]] = queue.SimpleQueue()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    began = time.perf_counter()
    prepared = backend.prepare(question("What is this?", ImagePart(picture)), sampling)
    backend.start(prepared, sampling, lambda chunk: arrivals.put((time.perf_counter(), chunk)))
    first, words = None, ""
    while True:
        at, chunk = arrivals.get()
        if isinstance(chunk, Exception):
            raise chunk
        first = first or at
        words += chunk.text
        if chunk.finish_reason is not None:
            return first - began, words


def print_naps(naps: Sequence[Nap]) -> None:
    heading = [
        "checkpoint", "parked in", "weights + KV MiB", "given back", "left MiB", "asleep s", "wake s",
        "to first token s", "more after MiB", "same words",
    ]  # fmt: skip
    rows = [
        [
            each.checkpoint,
            each.park,
            f"{(each.weights + each.kv_cache) / MIB:,.0f}",
            f"{each.share:.1%}",
            f"{each.asleep / MIB:,.0f}",
            f"{each.sleep_s:.2f}",
            f"{each.wake_s:.2f}",
            f"{each.first_token_s:.2f}",
            f"{(each.after - each.before) / MIB:,.0f}",
            "yes" if each.same_words else "NO",
        ]
        for each in naps
    ]
    print_rows([heading, *rows])


if __name__ == "__main__":
    main()
