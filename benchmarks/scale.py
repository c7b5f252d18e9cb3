"""The arithmetic of docs/scale.md: GPUs, days, bytes and money for a million pictures and many more.

    python -m benchmarks.scale                        the tables as they stand in docs/scale.md
    python -m benchmarks.scale --tokens 200 --picture-kb 900 --price 3.50
    python -m benchmarks.scale --pictures-per-s 12    of your GPU, as `vlfit batch --dry-run` prints it
    python -m benchmarks.scale --measure              only measure: names listed, records written and read

Every figure follows from inputs that are printed first with their sources. Only ``--measure`` measures
anything; what the inputs call measured was measured on the day that docs/log.md names. Seconds, no GPU.
"""

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, argument_parser, commit, cpu_name, print_table
from vlfit.api.conversation import ImagePart
from vlfit.api.outputs import Answer, ImageSeen, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.machine.cards import machine_with_card
from vlfit.plan.calibration import constants_for
from vlfit.plan.model_lookup import find_models
from vlfit.plan.native import gpu_cost
from vlfit.plan.planner import find_plan
from vlfit.plan.shapes import kv_bytes_per_token
from vlfit.plan.speed import TEXT_TOKENS
from vlfit.plan.wishes import Wishes
from vlfit.tasks.batch.items import Item, Record
from vlfit.tasks.batch.job import Job, PictureTask, Wish
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.ray.coordinator import CHUNK_ITEMS, CHUNKS_PER_WORKER
from vlfit.tasks.batch.sources import open_sources
from vlfit.units import MIB

MODEL = "Qwen/Qwen3-VL-4B-Instruct-FP8"
PICTURE_COUNTS = (10**6, 10**8, 10**10)
SEQUENCES = (8, 4, 2, 1)  # as ``vlfit plan`` tries them
IMAGE_TOKENS = 768  # of a picture of 1024x768
KEY_BYTES = 8  # of a key's hash (tasks/batch/keys.py)
MEASURED = ROOT / "benchmarks" / "measured" / "batch-h100.json"  # by ``benchmarks.batch_speed``
MEASURED_TOKENS = 64  # of an answer there; pictures are of 1024x768
NAME_BYTES = 60  # a path in a list
RAY_PICTURES_PER_S = 1000.0  # that the driver passes on in chunks of 32: measured by hand, load 6
RECORDS_PER_S = 10_183.0  # that one process writes as JSON lines: ``--measure`` on the same machine
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """``picture_bytes``: of an encoded file; ``bad``: share that cannot be read; ``price``: of a GPU hour, in
    any currency; ``start_s``: until a worker has loaded its model.
    """

    tokens: int
    picture_bytes: float
    bad: float
    price: float
    start_s: float
    pictures_per_s: float | None


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """Speed of one GPU with ``sequences`` at once."""

    name: str
    sequences: int
    pictures_per_s: float
    source: str


def planned_speed(name: str, typed: str, desktop: int, tokens: int) -> CardSpeed:
    """What ``vlfit plan`` expects of a card with as many requests at once as fit.

    The plan has the speed of one request; a step of several reads the weights once and the KV cache of each.
    """
    machine, models = machine_with_card(typed, desktop), find_models(MODEL).exact
    for sequences in SEQUENCES:
        wishes = Wishes(context=2048, image_tokens=IMAGE_TOKENS, sequences=sequences)
        made = find_plan(models, machine, wishes)
        if made.fits:
            break
    assert made.speed is not None
    speed, card = made.speed, made.gpu
    cached = (IMAGE_TOKENS + TEXT_TOKENS) * kv_bytes_per_token(made.model.cache_spec, made.settings.kv_dtype)
    longer = (speed.bytes_per_token + (sequences - 1) * cached) / speed.bytes_per_token
    step = longer / speed.decode.expected
    answer_s = tokens * step / sequences
    # Beside other requests a prompt is no CUDA graph.
    chunk, constants = made.settings.chunk, constants_for(card)
    prompt = gpu_cost.prompt_seconds(made.model, card, constants, IMAGE_TOKENS, TEXT_TOKENS, chunk)
    seconds = prompt.text + prompt.tower + answer_s
    return CardSpeed(name, sequences, 1 / seconds, "planned, not measured")


def measured_h100() -> list[CardSpeed]:
    """``vlfit batch`` of 4B FP8 on one H100, by requests at once."""
    runs = json.loads(MEASURED.read_text())["results"]
    return [
        CardSpeed("H100", run["at_once"], run["pictures_per_s"], "measured (benchmarks.batch_speed)")
        for run in runs
        if run["model"] == "4B-fp8"
    ]


def cards(inputs: Inputs) -> list[CardSpeed]:
    """Slowest first, with both plan and measurement of an H100; or only the speed that was given."""
    if inputs.pictures_per_s:
        return [CardSpeed("yours", 0, inputs.pictures_per_s, "given")]
    known = ("RTX 5060", "RTX 5060", 951 * MIB), ("RTX 4090", "RTX 4090", 0), ("H100", "H100 80GB HBM3", 0)
    speeds = [planned_speed(name, typed, desktop, inputs.tokens) for name, typed, desktop in known]
    return speeds + (measured_h100() if inputs.tokens == MEASURED_TOKENS else [])


def sample_record(tokens: int) -> Record:
    """A record as a batch writes it, with an answer of ``tokens`` words of four letters."""
    item = Item(
        "2019/summer/IMG_20190714_183005.jpg", bytes, Path("photos/2019/summer/IMG_20190714_183005.jpg")
    )
    seen = ImageSeen(1024, 768, 1024, 768, tokens=IMAGE_TOKENS)
    usage = Usage(IMAGE_TOKENS + TEXT_TOKENS, IMAGE_TOKENS, tokens)
    answer = Answer("word " * tokens, "stop", usage, MODEL, (seen,))
    return PictureTask(Wish.caption(), SamplingParams()).record(item, ImagePart(b"", item.key), answer)


def short(number: float) -> str:
    """1234567 as 1.2 million, 0.0123 as 0.012."""
    for size, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def size(number: float) -> str:
    """Bytes in units of a thousand, as disks and networks are sold."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number / 1e3:.3g} kB"


def span(seconds: float) -> str:
    """Days, or what is shorter."""
    if seconds >= 3 * 365 * DAY:
        return f"{seconds / (365 * DAY):.3g} years"
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:,.3g} days"
    return f"{seconds / 3600:.2g} hours" if seconds >= 3600 else f"{seconds / 60:.2g} minutes"


def tables(inputs: Inputs) -> list[tuple[str, list[list[str]]]]:
    every = cards(inputs)
    speeds = list({one.name: one for one in every}.values())  # the last of each card: measured, if it was
    return [
        ("Inputs", inputs_table(inputs)),
        ("One card", card_table(every)),
        ("Time, cards, money", time_table(speeds, inputs)),
        ("Jobs at a time", jobs_table(speeds)),
        ("Bytes and tokens", bytes_table(inputs)),
        ("Network while 64 cards work", network_table(speeds, inputs)),
        ("What a failure costs", failure_table(speeds, inputs)),
    ]


def inputs_table(inputs: Inputs) -> list[list[str]]:
    record = len(json.dumps(sample_record(inputs.tokens))) + 1
    return [
        ["input", "value", "from"],
        ["model", MODEL, "an example"],
        ["picture", f"1024x768, {IMAGE_TOKENS} tokens", "an example"],
        ["a file of it", size(inputs.picture_bytes), "assumed: JPEG"],
        ["answer", f"{inputs.tokens} tokens", "assumed: two sentences"],
        ["prompt", f"{IMAGE_TOKENS + TEXT_TOKENS} tokens", "plan/speed.py"],
        ["a record as a JSON line", f"{record} bytes", "counted of one made here"],
        ["a name in a list", f"{NAME_BYTES} bytes", "assumed"],
        ["passed on by one --ray job", f"{short(RAY_PICTURES_PER_S)} pictures/s", "by hand, see the end"],
        ["written by one process", f"{short(RECORDS_PER_S)} records/s", "--measure, see the end"],
        ["bad pictures", f"{100 * inputs.bad:g} %", "assumed"],
        ["an hour of a card", f"{inputs.price:g}", "assumed; put your own in"],
        ["a worker's start", f"{inputs.start_s:g} s", "assumed: process, weights, warming up"],
        [
            "pictures that a dead worker had",
            str(CHUNKS_PER_WORKER * CHUNK_ITEMS),
            "tasks/batch/ray/coordinator.py",
        ],
    ]


def card_table(speeds: list[CardSpeed]) -> list[list[str]]:
    rows = [["card", "at once", "pictures/s", "a day", ""]]
    for one in speeds:
        a_day = short(DAY * one.pictures_per_s)
        rows.append([one.name, str(one.sequences), f"{one.pictures_per_s:.3g}", a_day, one.source])
    return rows


def time_table(speeds: list[CardSpeed], inputs: Inputs) -> list[list[str]]:
    counts = (1, 8, 64, 512)
    head = ["pictures", "card", *(f"{count} card{'s' * (count > 1)}" for count in counts)]
    rows = [[*head, "cards for 30 days", "card-hours", f"at {inputs.price:g} an hour"]]
    for pictures in PICTURE_COUNTS:
        for one in speeds:
            seconds = pictures / one.pictures_per_s
            spans = [span(seconds / count) for count in counts]
            wanted = f"{-(-seconds // (30 * DAY)):,.0f}"
            hours = seconds / 3600
            rows.append(
                [
                    short(pictures),
                    with_sequences(one),
                    *spans,
                    wanted,
                    short(hours),
                    short(hours * inputs.price),
                ]
            )
    return rows


def with_sequences(one: CardSpeed) -> str:
    """The card, with the requests at once that its speed is for."""
    return f"{one.name}, {one.sequences} at once" if one.sequences else one.name


def jobs_table(speeds: list[CardSpeed]) -> list[list[str]]:
    """How many --ray jobs keep so many cards busy; in brackets how many if only writing limited them."""
    counts = (64, 144, 512)
    rows = [["card", *(f"{count} cards" for count in counts)]]
    for one in speeds:
        cells = []
        for count in counts:
            rate = count * one.pictures_per_s
            jobs, outputs = (math.ceil(rate / most) for most in (RAY_PICTURES_PER_S, RECORDS_PER_S))
            cells.append(f"{short(rate)}/s: {jobs} ({outputs})")
        rows.append([with_sequences(one), *cells])
    return rows


def bytes_table(inputs: Inputs) -> list[list[str]]:
    record = len(json.dumps(sample_record(inputs.tokens))) + 1
    head = [
        "pictures",
        "files",
        "records",
        "list of names",
        "hashes of keys",
        "prompt tokens",
        "answer tokens",
    ]
    rows = [[*head, "bad pictures"]]
    for pictures in PICTURE_COUNTS:
        parts = [size(pictures * each) for each in (inputs.picture_bytes, record, NAME_BYTES, KEY_BYTES)]
        tokens = [short(pictures * each) for each in (IMAGE_TOKENS + TEXT_TOKENS, inputs.tokens)]
        rows.append([short(pictures), *parts, *tokens, short(pictures * inputs.bad)])
    return rows


def network_table(speeds: list[CardSpeed], inputs: Inputs) -> list[list[str]]:
    rows = [["card", "pictures/s of 64", "files read", "of it per card", "records written"]]
    record = len(json.dumps(sample_record(inputs.tokens))) + 1
    for one in speeds:
        rate = 64 * one.pictures_per_s
        read = rate * inputs.picture_bytes
        written = f"{size(rate * record)}/s"
        rows.append([one.name, short(rate), f"{size(read)}/s", f"{size(read / 64)}/s", written])
    return rows


def failure_table(speeds: list[CardSpeed], inputs: Inputs) -> list[list[str]]:
    """On average half of a worker's pictures are done when it dies; that half is lost."""
    head = ["card", "done again, s of one card", "with its start", "lost if it dies every hour", "every day"]
    rows = [head]
    for one in speeds:
        again = CHUNKS_PER_WORKER * CHUNK_ITEMS / 2 / one.pictures_per_s
        lost = again + inputs.start_s
        shares = [f"{100 * lost / (lost + each):.2g} %" for each in (3600.0, DAY)]
        rows.append([one.name, f"{again:.2g}", f"{lost:.3g}", *shares])
    return rows


def measure(names: int, records: int) -> list[list[str]]:
    """Rows of a table: names listed, records written and read a second by one process on this machine."""
    rows = [["by one process", "in a second", "cards of 20 pictures/s that it keeps up with"]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "pictures"
        for number in range(names):
            below = folder / f"{number // 1000:04}"
            below.mkdir(parents=True, exist_ok=True)
            (below / f"{number:07}.jpg").touch()
        start = time.perf_counter()
        listed = sum(1 for _ in open_sources([str(folder)]))
        rates = {f"names listed, of a folder of {listed:,} files": listed / (time.perf_counter() - start)}
        listing = Path(scratch) / "names.txt"
        listing.write_text("".join(f"/photos/{number:09}.jpg\n" for number in range(names)))
        start = time.perf_counter()
        listed = sum(1 for _ in open_sources([str(listing)]))
        rates["names read of a list"] = listed / (time.perf_counter() - start)
        rates["records written as JSON lines"] = _write_rate(Path(scratch) / "out.jsonl", records)
        start = time.perf_counter()
        resumed = Output(_job(Path(scratch) / "out.jsonl"))
        rates["records read again, when a job goes on"] = resumed.done_before / (time.perf_counter() - start)
        resumed.close()
    rows += [[what, short(rate), short(rate / 20)] for what, rate in rates.items()]
    return rows


def _job(path: Path) -> Job:
    return Job(Wish.caption(), SamplingParams(), ("photos",), path)


def _write_rate(path: Path, records: int) -> float:
    output = Output(_job(path))
    record = sample_record(64)
    try:
        output.begin(MODEL)
        start = time.perf_counter()
        for number in range(records):
            key = f"{number:07}.jpg"
            output.write(Item(key, bytes), {**record, "key": key})
        output.flush()
        return records / (time.perf_counter() - start)
    finally:
        output.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--picture-kb", type=float, default=200.0)
    parser.add_argument("--bad", type=float, default=0.002, help="share of pictures that cannot be read")
    parser.add_argument("--price", type=float, default=2.0, help="of a GPU hour")
    parser.add_argument("--start", type=float, default=60.0, help="seconds until a worker has its model")
    parser.add_argument("--pictures-per-s", type=float, help="of one GPU, instead of the three")
    parser.add_argument("--measure", action="store_true", help="measure this machine instead")
    parser.add_argument("--names", type=int, default=100_000, help="with --measure")
    options = parser.parse_args()
    if options.measure:
        load = os.getloadavg()[0]
        print(f"commit {commit()}, {cpu_name()}, {os.cpu_count()} cores, load {load:.1f}\n")
        print_table(measure(options.names, options.names // 2))
        return
    inputs = Inputs(
        options.tokens,
        1e3 * options.picture_kb,
        options.bad,
        options.price,
        options.start,
        options.pictures_per_s,
    )
    for title, rows in tables(inputs):
        print(f"**{title}**\n")
        print_table(rows)
        print()


if __name__ == "__main__":
    main()
