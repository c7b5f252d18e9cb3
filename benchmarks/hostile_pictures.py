"""Hostile pictures over HTTP while a good client streams: what they cost server, decode workers and client.

    python -m benchmarks.hostile_pictures                   every kind, alone and 8 at once: eight minutes
    python -m benchmarks.hostile_pictures --kinds png,gif   only kinds whose names begin so
    python -m benchmarks.hostile_pictures --decoding        only the time that decoding in workers adds
    python -m benchmarks.hostile_pictures --plain           what each does to Pillow in a process with 4 GiB
                                                            and 60 s of CPU time: ten minutes

`vlfit serve mini` runs with its default options; a good client streams one answer after the other from it.
The kinds are those of ``tests/hostile_pictures``. First each is sent alone and waited for, small files before
large ones, and sound pictures in between, which show how late tokens are anyway; then 8 clients send all of
them twice, and hang up on every other request; sound pictures before and after, 8 at once as well. The exit
code is 1 if a limit is missed:

- RSS of the server: 64 MiB more, at any time
- large files beside its heap (memfd), which RSS does not show: no more than were sent at once
- memory of the workers: what ``images/decode_memory.py`` states, for each and for all together
- tokens of the good client: the latest is 250 ms later than with sound pictures
- places: 8 sound pictures sent after the last hang-up are answered within 10 s
- no reply of 5xx, and none that takes more than ``--patience``
- a JPEG of 1024x768: decoded in workers, alone or 8 at once, its median is 1 ms more than in this process
"""

import argparse
import base64
import http.client
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import (
    MIB,
    ROOT,
    add_json_option,
    alternate,
    argument_parser,
    at_once,
    commit,
    environment,
    in_mib,
    print_row,
    print_table,
    process_tree,
    versions_of,
    write_json,
)
from benchmarks.serving import ServerProcess, random_jpeg
from tests.hostile_pictures import KINDS
from vlfit.units import GIB

MAX_GROWTH = 64 * MIB
MAX_LATENESS = 0.25
MAX_SECONDS_TO_FREE = 10.0
MAX_ADDED = 0.001
SMALL_FILE = MIB
CLIENTS = 8
CLIP, FRAME, NUM_FRAMES = (
    "clip-of-1-bit-pngs",
    "png-1-bit-143-megapixels",
    4,
)  # one file, as each of its frames
QUIET, SOUND_ALONE, SOUND_AT_ONCE = "nobody else", "sound pictures alone", "sound pictures, 8 at once"
ALONE_SMALL, ALONE_LARGE, AT_ONCE = "small files alone", "large files alone", "8 at once, hanging up"
MAX_BETWEEN = 1.0  # seconds of sound pictures after each hostile one
SAMPLE_SECONDS = 0.05
SETTLE_SECONDS = 3.0  # until what was hung up on has ended, and freed memory is given back
STREAM_TOKENS = 200
PLAIN_MEMORY, PLAIN_CPU = 4 * GIB, 60


def main() -> None:
    options = read_options()
    if options.stream:
        stream_answers(options.stream)
        return
    if options.decode:
        print(json.dumps(decode_plainly(options.decode)))
        return
    names = [name for name in (*KINDS, CLIP) if name.startswith(tuple(options.kinds.split(",")))]
    if options.plain:
        print_plain([name for name in names if name != CLIP], options.json)
        return
    facts = {"commit": commit(), "cores": os.cpu_count(), **versions_of("pillow", "torch")}
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    result: dict[str, Any] = {"facts": facts, "verdicts": []}
    if not options.decoding:
        result |= serve_hostile(names, options)
    result["decoding"], missed = decoding_times(options.rounds)
    result["verdicts"] += missed
    write_json(options.json, result)
    for verdict in result["verdicts"]:
        print(f"MISSED: {verdict}")
    sys.exit(1 if result["verdicts"] else 0)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--kinds", default="", metavar="A,B", help="beginnings of names; default: all")
    parser.add_argument(
        "--serve", default="", metavar="WORDS", help="more options of vlfit serve, in one word"
    )
    parser.add_argument("--patience", type=float, default=90.0, metavar="S", help="for one reply")
    parser.add_argument("--quiet", type=float, default=15.0, metavar="S", help="length of the quiet run")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="nothing new is sent at once after so long"
    )
    parser.add_argument("--rounds", type=int, default=60, help="of the decoding times")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--decoding", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--stream", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--decode", metavar="KIND", help=argparse.SUPPRESS)
    add_json_option(parser)
    return parser.parse_args()


# --- a server under attack ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. ``ended``: the HTTP status and the error's code, or why there is none."""

    kind: str
    size: int
    ended: str
    seconds: float
    began: float

    @property
    def span(self) -> tuple[float, float]:
        return self.began, self.began + self.seconds

    @property
    def is_server_error(self) -> bool:
        return self.ended.startswith(("5", "broken off"))


@dataclass
class Attack:
    """What was sent in a phase.

    ``wait``: the good client's longest for a token. ``usual_wait``: the same while sound pictures are sent in
    between, on a machine as busy with other things. ``growth``: of the server's RSS. ``beside``: bytes of
    large files that are not in it.
    """

    name: str
    began: float = 0.0
    ended: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    between: list[Sent] = field(default_factory=list)
    wait: float = 0.0
    usual_wait: float = 0.0
    growth: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes at a moment: RSS of the server, files beside it, and PSS of its workers, each and together."""

    at: float
    server: int
    beside: int
    largest_worker: int
    workers: int


def serve_hostile(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    with (
        ServerProcess(["mini", "--quiet", *options.serve.split()], None) as server,
        tempfile.TemporaryDirectory(prefix="vlfit-hostile-") as folder,
    ):
        memory = MemoryWatch(server.pid)
        with good_client(server.url, Path(folder) / "tokens") as tokens, memory:
            warm_up(server.url)
            before = memory.now()
            quiet = pause(options.quiet)
            sound = [
                send_sound(server.url, SOUND_ALONE, 1, options.quiet),
                send_sound(server.url, SOUND_AT_ONCE, CLIENTS, options.quiet),
            ]
            small, large = split_by_size(names)
            alone = [
                send_alone(server.url, name, part, options.patience)
                for name, part in ((ALONE_SMALL, small), (ALONE_LARGE, large))
                if part
            ]
            together = send_at_once(server.url, names, options)
            to_free = seconds_to_free(server.url, options.patience)
            sound.append(send_sound(server.url, SOUND_AT_ONCE, CLIENTS, options.quiet))
            time.sleep(SETTLE_SECONDS)
            after = memory.now()
            waits = list(tokens.waits())
        phases = [quiet, *sound[:2], *alone, together, sound[2]]
        for phase in phases:
            if phase.between:
                phase.wait = max(longest_wait(waits, *each.span) for each in phase.sent)
                phase.usual_wait = max(longest_wait(waits, *each.span) for each in phase.between)
            else:
                phase.wait = longest_wait(waits, phase.began, phase.ended)
            phase.growth = memory.peak("server", phase.began, phase.ended) - before
            phase.beside = memory.peak("beside", phase.began, phase.ended)
    return judge(phases, memory, waits, before, after, to_free)


def split_by_size(names: list[str]) -> tuple[list[str], list[str]]:
    sizes = {name: len(file_of(name)) for name in names}
    return [n for n in names if sizes[n] <= SMALL_FILE], [n for n in names if sizes[n] > SMALL_FILE]


def note(text: str) -> None:
    """Print how far it is, with the machine's load: other programs delay tokens, too."""
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{time.strftime('%H:%M:%S')}  {load}  {text}", file=sys.stderr, flush=True)


def pause(seconds: float) -> Attack:
    note(QUIET)
    began = time.monotonic()
    time.sleep(seconds)
    return Attack(QUIET, began, time.monotonic())


def warm_up(url: str) -> None:
    """Let the server take what it keeps: workers, caches, and the buffers of a large request."""
    body = body_of(random_jpeg(1024, 768, 0))
    for padding in (0, 0, 50 * MIB):
        send(url, "sound", body + b" " * padding, 60.0)
    at_once([lambda: send(url, "sound", body, 60.0)] * CLIENTS)
    time.sleep(SETTLE_SECONDS)


def send_sound(url: str, name: str, clients: int, seconds: float) -> Attack:
    """Sound pictures, for comparison."""
    note(name)
    attack = Attack(name, time.monotonic())
    until = attack.began + seconds

    def send_some(number: int) -> None:
        while time.monotonic() < until:
            attack.sent.append(send(url, "sound", body_of(random_jpeg(1024, 768, number)), 60.0))

    at_once([partial(send_some, number) for number in range(clients)])
    attack.ended = time.monotonic()
    return attack


def send_alone(url: str, name: str, names: list[str], patience: float) -> Attack:
    note(name)
    attack = Attack(name, time.monotonic())
    for kind in names:
        file = file_of(kind)
        attack.sent.append(send(url, kind, body_of(file, kind), patience, len(file)))
        if attack.sent[-1].seconds > 5:
            note(f"{kind}: {attack.sent[-1].ended} after {attack.sent[-1].seconds:.1f} s")
        if attack.sent[-1].ended.startswith("no server"):
            break
        attack.between += sound_for(url, min(attack.sent[-1].seconds, MAX_BETWEEN))
    attack.ended = time.monotonic()
    return attack


def sound_for(url: str, seconds: float) -> list[Sent]:
    """Sound pictures, one after the other, for so long; at least one."""
    until = time.monotonic() + seconds
    sent = [send(url, "sound", body_of(random_jpeg(1024, 768, 2)), 60.0)]
    while time.monotonic() < until:
        sent.append(send(url, "sound", body_of(random_jpeg(1024, 768, 2)), 60.0))
    return sent


def send_at_once(url: str, names: list[str], options: argparse.Namespace) -> Attack:
    """All kinds twice, in a random order; every other request is hung up on."""
    note(AT_ONCE)
    attack = Attack(AT_ONCE, time.monotonic())
    chance = random.Random(options.seed)
    waiting = [(name, hang_up) for name in names for hang_up in (True, False)]
    chance.shuffle(waiting)
    lock = threading.Lock()

    def send_some() -> None:
        while time.monotonic() - attack.began < options.seconds:
            with lock:
                if not waiting:
                    return
                kind, hang_up = waiting.pop()
                patience = chance.uniform(0.02, 1.0) if hang_up else options.patience
            file = file_of(kind)
            sent = send(url, kind, body_of(file, kind), patience, len(file), hang_up=hang_up)
            attack.sent.append(sent)

    at_once([send_some] * CLIENTS)
    attack.ended = time.monotonic()
    return attack


def seconds_to_free(url: str, patience: float) -> float | None:
    """Until as many sound pictures as there were attackers are all answered; None if one is not."""
    began = time.monotonic()
    body = body_of(random_jpeg(1024, 768, 1))
    replies = at_once([lambda: send(url, "sound", body, patience)] * CLIENTS)
    if any(reply.ended != "200" for reply in replies):
        return None
    return time.monotonic() - began


def file_of(kind: str) -> bytes:
    return KINDS[FRAME if kind == CLIP else kind].file()


def body_of(file: bytes, kind: str = "") -> bytes:
    """A chat request about a picture or a clip, in low detail: the model takes little of the time."""
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": "@", "detail": "low"}}
    if kind == CLIP:
        part = {"type": "video", "frames": ["@"] * NUM_FRAMES}
    content = [part, {"type": "text", "text": "What is this?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
    return body.replace(b"@", b"data:image/png;base64," + base64.b64encode(file))


def send(url: str, kind: str, body: bytes, patience: float, size: int = 0, *, hang_up: bool = False) -> Sent:
    """Send one request; close the connection after ``patience`` without a reply."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=30)
    began = time.monotonic()
    try:
        try:
            connection.connect()
        except OSError as error:
            return Sent(kind, size, f"no server: {error}", time.monotonic() - began, began)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        if connection.sock is not None:
            connection.sock.settimeout(max(patience, 0.001))
        answer = connection.getresponse()
        content = answer.read()
        ended = str(answer.status)
        if answer.status != 200:
            with suppress(ValueError, KeyError, TypeError):
                ended += f" {json.loads(content)['error']['code']}"
    except TimeoutError:
        ended = "hung up" if hang_up else f"no reply in {patience:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        ended = f"broken off: {type(error).__name__}"
    finally:
        connection.close()
    return Sent(kind, size, ended, time.monotonic() - began, began)


# --- the good client ---------------------------------------------------------------------------------------


class TokenLog:
    """Times of tokens that a process of its own writes, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def waits(self) -> Iterator[tuple[float, float]]:
        """When a wait for a token began, and its seconds; also for the first token of an answer."""
        times = [float(line) for line in self._path.read_text("ascii").splitlines()]
        times.append(time.monotonic())  # it is waiting still
        for last, at in pairwise(times):
            yield last, at - last


@contextmanager
def good_client(url: str, path: Path) -> Iterator[TokenLog]:
    """Run one in a process of its own, so that what this one does cannot delay it."""
    with path.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hostile_pictures", "--stream", url],
            stdout=file,
            cwd=ROOT,
            env=environment(),
        )
        try:
            while not path.stat().st_size and child.poll() is None:
                time.sleep(0.05)
            yield TokenLog(path)
        finally:
            child.terminate()
            child.wait()


def stream_answers(url: str) -> None:
    """Stream one answer after the other, until killed; print the time of each token."""
    address = urlsplit(url)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "logprobs": True,  # an event for every token, even if it is part of a character
            "stream": True,
        }
    )
    while True:
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if b'"logprob":' in line:
                    print(f"{time.monotonic():.4f}", flush=True)
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)  # its absence shows as a long wait
        finally:
            connection.close()


def longest_wait(waits: list[tuple[float, float]], began: float, ended: float) -> float:
    """Of those that overlap with the time from ``began`` to ``ended``."""
    return max((wait for at, wait in waits if at < ended and at + wait > began), default=0.0)


# --- memory ------------------------------------------------------------------------------------------------


class MemoryWatch:
    """Samples of a server and the processes that it has started, inside the ``with`` block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples: list[MemorySample] = []
        self.num_workers = 0  # at most at once

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> int:
        return rollup(self._pid, "Rss")

    def peak(self, name: str, began: float = 0.0, ended: float = float("inf")) -> int:
        return max((getattr(each, name) for each in self.samples if began <= each.at <= ended), default=0)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            workers = [rollup(pid, "Pss") for pid in process_tree(self._pid)[1:]]
            self.num_workers = max(self.num_workers, len(workers))
            server = self.now(), memfd_bytes(self._pid)
            sample = MemorySample(time.monotonic(), *server, max(workers, default=0), sum(workers))
            self.samples.append(sample)


def rollup(pid: int, line: str) -> int:
    """``Rss`` or ``Pss`` (pages that are shared count in parts) of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(each.split()[1]) * 1024 for each in lines if each.startswith(f"{line}:")), 0)


def memfd_bytes(pid: int) -> int:
    """RAM of the anonymous files that a process has open; its RSS does not contain them."""
    total = 0
    with suppress(OSError):  # it has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(link).startswith("/memfd:vlfit"):
                    total += link.stat().st_blocks * 512
    return total


def stated_limits() -> tuple[int, int]:
    """Bytes of the largest worker, and of all with the process that forks them."""
    from vlfit.images import decode_memory

    each = decode_memory.MAX_DECODE_BYTES + decode_memory.WORKER_BYTES + decode_memory.FORK_SERVER_BYTES
    return each, decode_memory.max_bytes_of_workers()


# --- the verdict -------------------------------------------------------------------------------------------


def judge(
    phases: list[Attack],
    memory: MemoryWatch,
    waits: list[tuple[float, float]],
    before: int,
    after: int,
    to_free: float | None,
) -> dict[str, Any]:
    print_kinds(phases, memory, waits, before)
    rows = [
        [
            "phase",
            "requests",
            "seconds",
            "longest wait for a token, ms",
            "with sound ones",
            "server, MiB more",
            "beside it, MiB",
        ]
    ]
    for each in phases:
        usual = f"{each.usual_wait * 1000:,.0f}" if each.between else ""
        times = [f"{each.ended - each.began:.0f}", f"{each.wait * 1000:,.0f}", usual]
        rows.append([each.name, str(len(each.sent)), *times, in_mib(each.growth), in_mib(each.beside)])
    print()
    print_table(rows)
    attacks = [each for each in phases if each.name in (ALONE_SMALL, ALONE_LARGE, AT_ONCE)]
    sent = [each for attack in attacks for each in attack.sent]
    counts = Counter(each.ended for each in sent).most_common()
    print("\nreplies:", ", ".join(f"{count} {ended}" for ended, count in counts))

    sound = max(each.wait for each in phases if each.name == SOUND_AT_ONCE)
    lateness = max(each.wait - (sound if each.name == AT_ONCE else each.usual_wait) for each in attacks)
    growth = max((each.growth for each in attacks), default=0)
    beside = max((each.beside for each in attacks), default=0)
    most_beside = CLIENTS * max((each.size for each in sent), default=0)
    largest, together = memory.peak("largest_worker"), memory.peak("workers")
    limits = stated_limits()
    failed = [each for each in sent if each.is_server_error]
    unanswered = [each for each in sent if each.ended.startswith("no ")]
    measured = [
        ("server, most", in_mib(growth), in_mib(MAX_GROWTH), growth <= MAX_GROWTH),
        ("files beside it", in_mib(beside), in_mib(most_beside), beside <= most_beside),
        ("server, at the end", in_mib(after - before), in_mib(MAX_GROWTH), after - before <= MAX_GROWTH),
        ("largest worker", in_mib(largest), in_mib(limits[0]), largest <= limits[0]),
        ("all workers", in_mib(together), in_mib(limits[1]), together <= limits[1]),
        ("latest token, s", f"{lateness:.3f}", f"{MAX_LATENESS}", lateness <= MAX_LATENESS),
        (
            "places free after, s",
            "never" if to_free is None else f"{to_free:.1f}",
            f"{MAX_SECONDS_TO_FREE:.0f}",
            to_free is not None and to_free <= MAX_SECONDS_TO_FREE,
        ),
        ("5xx and broken off", str(len(failed)), "0", not failed),
        ("without a reply", str(len(unanswered)), "0", not unanswered),
    ]
    print(f"\nserver: {in_mib(before)} MiB before; processes beside it: {memory.num_workers} at most\n")
    print_table(
        [["MiB if not said", "measured", "limit", ""]]
        + [[*row[:3], "" if row[3] else "MISSED"] for row in measured]
    )
    for request in [*failed, *unanswered]:
        print(f"{request.kind}: {request.ended} after {request.seconds:.1f} s")
    return {
        "phases": [asdict(each) for each in phases],
        "server": {"before": before, "growth": growth, "beside": beside, "after": after},
        "workers": {"largest": largest, "together": together, "limits": limits},
        "lateness_s": lateness,
        "free_after_s": to_free,
        "verdicts": [f"{row[0]}: {row[1]}, limit {row[2]}" for row in measured if not row[3]],
    }


def print_kinds(
    phases: list[Attack], memory: MemoryWatch, waits: list[tuple[float, float]], before: int
) -> None:
    """Print what each kind did that was sent alone."""
    head = ["kind", "bytes", "reply", "seconds", "wait for a token, ms", "server, MiB more", "worker, MiB"]
    print_row(head)
    print_row(["---"] * len(head))
    alone = [each for each in phases if each.name in (ALONE_SMALL, ALONE_LARGE)]
    for sent in (each for attack in alone for each in attack.sent):
        span = sent.span
        print_row(
            [
                sent.kind,
                f"{sent.size:,}",
                sent.ended,
                f"{sent.seconds:.2f}",
                f"{longest_wait(waits, *span) * 1000:,.0f}",
                in_mib(max(memory.peak("server", *span) - before, 0)),
                in_mib(memory.peak("largest_worker", *span)),
            ]
        )


# --- what decoding in workers adds -------------------------------------------------------------------------


def decoding_times(rounds: int) -> tuple[dict[str, float], list[str]]:
    """Milliseconds for a JPEG of 1024x768 that becomes 512x384: here and in workers, alone and 8 at once."""
    import numpy as np

    from vlfit.images import decode
    from vlfit.images.decode_pool import DecodePool

    file = random_jpeg(1024, 768, 3)
    pool = DecodePool()

    def here() -> None:
        image = decode.decode(file, "picture").image
        np.asarray(decode.resize(image, 512, 384))

    def in_workers() -> None:
        pool.decode(file, "picture", lambda width, height: (512, 384))

    variants = {"here": here, "in workers": in_workers}
    found: dict[str, float] = {}
    for count, number in ((1, rounds), (CLIENTS, max(rounds // 4, 3))):
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for call in variants.values():
            at_once([call] * count)
        for _, name in alternate(number, list(variants)):
            began = time.perf_counter()
            at_once([variants[name]] * count) if count > 1 else variants[name]()
            seconds[name].append(time.perf_counter() - began)
        for name, values in seconds.items():
            found[f"{name}, {count} at once"] = statistics.median(values)
    pool.close()
    print("\ndecoding 1024x768, median:", ", ".join(f"{name} {s * 1000:.2f} ms" for name, s in found.items()))
    added = found["in workers, 1 at once"] - found["here, 1 at once"]
    slower = found[f"in workers, {CLIENTS} at once"] - found[f"here, {CLIENTS} at once"]
    missed = []
    if added > MAX_ADDED:
        missed.append(f"decoding in workers adds {added * 1000:.2f} ms")
    if slower > CLIENTS * MAX_ADDED:
        missed.append(f"{CLIENTS} at once take {slower * 1000:.2f} ms longer in workers")
    return found, missed


# --- plain Pillow ------------------------------------------------------------------------------------------


def print_plain(names: list[str], file: Path | None) -> None:
    """What each kind does to Pillow alone, so that it is known to attack something."""
    rows = []
    print_row(["kind", "attacks", "bytes", "seconds", "RSS, MiB", "result"])
    print_row(["---"] * 6)
    for name in names:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.hostile_pictures", "--decode", name],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(),
            check=False,
        )
        row: dict[str, Any] = {"kind": name, "bytes": len(KINDS[name].file()), "rss": None}
        if done.returncode:
            row |= {"seconds": time.monotonic() - began, "result": f"ended with {done.returncode}"}
        else:
            row |= json.loads(done.stdout)
        rows.append(row)
        cells = [f"{row['bytes']:,}", f"{row['seconds']:.2f}", in_mib(row["rss"]), row["result"]]
        print_row([name, KINDS[name].attacks, *cells])
    write_json(file, rows)


def decode_plainly(name: str) -> dict[str, Any]:
    import warnings

    from PIL import Image

    resource.setrlimit(resource.RLIMIT_AS, (PLAIN_MEMORY, PLAIN_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PLAIN_CPU, PLAIN_CPU))
    warnings.simplefilter("ignore")
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    file = KINDS[name].file()
    began = time.perf_counter()
    try:
        image = Image.open(BytesIO(file))
        image.load()
        image.convert("RGB")
        outcome = f"{image.format} {image.width}x{image.height}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:60]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - began, "rss": rss, "result": outcome}


if __name__ == "__main__":
    main()
