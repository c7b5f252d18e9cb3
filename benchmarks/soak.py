"""A thousand mixed requests over HTTP, and whether memory stays where it was.

    python -m benchmarks.soak --json FILE               4B in FP8 with 7,200 MiB of the card free
    python -m benchmarks.soak --model mini --device cpu --requests 40 --settled 10

Pictures of 64 to 4,000 pixels, one to four in a request, 1 to 600 tokens out, a third hung up on midway; some
with `detail: low`, some too large for the context, some broken, and now and then more at once than may wait.
What has to come of each is written down before it is sent (``soak_requests.py``). The exit code is 1 if
anything else came, if the card's memory moved by a MiB after the first ``--settled`` requests, or if the
server's RAM grew by 50 MiB from then to the end. It is looked at when nobody asks: before the first request,
after ``--settled`` and after the last; and in between, for the curve.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.asking import HUNG_UP, Reply, ask, ask_and_hang_up, new_client
from benchmarks.facts import card, commit
from benchmarks.hold import Hold
from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB, versions_of
from benchmarks.memory import Row, planned
from benchmarks.random_weights import room_in_memory, write_random
from benchmarks.report import print_rows
from benchmarks.served import DidNotStart, Served
from benchmarks.soak_memory import Moment, growth, in_mib, look, table
from benchmarks.soak_requests import BURST, Wanted, requests
from vlfit.checkpoint.source import locate
from vlfit.models.registry import read_config

CONTEXT = 6144
MOST_RESIDENT_GROWTH = 50 * MIB
FLAT = MIB
SETTLING = 3.0  # seconds after the last answer: who was hung up on ends at the next step, heaps are trimmed
MOST_TRIES = 120
READY, SETTLED, END = "ready", "settled", "the end"  # moments at which nobody asks
EVERY = 50  # requests between two looks in between
PLACES_PER_SEQUENCE = 8  # requests that may wait behind each (``cli/serving.py``)


@dataclass
class Soak:
    """What came of the requests. Many threads add to it, one at a time."""

    asked: int
    replies: list[tuple[Wanted, Reply]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, served: Served, wanted: Wanted, replies: list[Reply]) -> None:
        with self.lock:
            before = len(self.replies)
            self.replies += [(wanted, reply) for reply in replies]
            if len(self.replies) // EVERY > before // EVERY:
                self.look(served)

    def look(self, served: Served, name: str = "") -> None:
        self.moments.append(look(served, name, len(self.replies)))

    def at(self, name: str) -> Moment | None:
        """The moment of that name, if it came to that."""
        return next((each for each in self.moments if each.name == name), None)

    @property
    def wrong(self) -> list[tuple[Wanted, Reply]]:
        return [(wanted, reply) for wanted, reply in self.replies if not wanted.fits(reply)]


def main() -> None:
    options = read_options()
    facts: dict[str, Any] = {"commit": commit(), **versions_of("torch", "triton")}
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory(prefix="vlfit-soak-", dir=room_in_memory()) as folder:
        if is_made(options):
            place = write_random(Path(folder) / options.model, *options.model.split("-"))
        else:
            _, place = locate(options.model)
        options.context = options.context or usual_context(place)
        row = Row(options.model, "", options.context, options.image_tokens, options.sequences)
        places = options.sequences + max(PLACES_PER_SEQUENCE * options.sequences, 16)
        work = requests(options.requests, options.context, options.image_tokens, places, options.seed)
        try:
            with held(options) as meter:
                arguments = [*planned(row, place, on_gpu=meter is not None), *options.serve.split()]
                with Served(arguments, meter) as served:
                    facts |= {"card": card(), "ready_s": round(served.ready_s, 2)} if meter else {}
                    found = run(served, options, work)
                    result = {"facts": facts, "command": arguments, **told(served, found, options)}
                    print_result(result, found, served)
        except DidNotStart as error:
            sys.exit(f"the server did not start: {error}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), "utf-8")
    sys.exit(1 if result["verdicts"] else 0)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="4B-fp8", help="SIZE-FORMAT, written with random weights; or mini, or a folder"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--free", type=int, default=7200, metavar="MIB", help="of the card; 0: all of it")
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--settled", type=int, default=100, metavar="N", help="memory counts from here on")
    parser.add_argument("--context", type=int, help=f"{CONTEXT:,} unless the checkpoint is made for less")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--image-tokens", type=int, default=1280)
    parser.add_argument(
        "--serve", default="", metavar="WORDS", help="more options of vlfit serve, in one word"
    )
    parser.add_argument("--clients", type=int, default=8, help="that wait for an answer at any time")
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing new is asked after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    return parser.parse_args()


def is_made(options: argparse.Namespace) -> bool:
    """Whether the model is a size and a format, and no checkpoint yet."""
    return "-" in options.model and not Path(options.model).exists()


def usual_context(place: Path) -> int:
    """Tokens of the context where none was asked for: never more than the checkpoint runs with."""
    return min(CONTEXT, read_config(place).text.max_position_embeddings)


@contextmanager
def held(options: argparse.Namespace) -> Iterator[Meter | None]:
    """The card with so much free as was asked for; None where no card is used."""
    if options.device == "cpu":
        yield None
    elif not options.free:
        yield Meter()
    else:
        with Hold() as hold:
            hold.leave(options.free * MIB)
            yield Meter()


def run(served: Served, options: argparse.Namespace, work: list[Wanted]) -> Soak:
    """Ask all of ``work``, and look at the server before it, after those that settle it, and at the end."""
    found = Soak(options.requests)
    until = time.perf_counter() + options.seconds
    found.look(served, READY)
    first = settling(work, options.settled)
    for part, moment in ((work[:first], SETTLED), (work[first:], END)):
        if part:
            ask_all(served, found, part, options.clients, until)
            time.sleep(SETTLING)
        if moment == END or len(found.replies) >= options.settled:
            found.look(served, moment)
    return found


def settling(work: list[Wanted], count: int) -> int:
    """How many of ``work`` come to ``count`` requests."""
    asked = 0
    for number, wanted in enumerate(work):
        if asked >= count:
            return number
        asked += wanted.count
    return len(work)


def ask_all(served: Served, found: Soak, work: list[Wanted], clients: int, until: float) -> None:
    """In the order of ``work``, with so many clients at once; a burst has clients of its own."""
    waiting = iter(work)
    turn = threading.Lock()

    def one_client() -> None:
        with new_client() as client:
            while time.perf_counter() < until:
                with turn:
                    wanted = next(waiting, None)
                if wanted is None:
                    return
                if wanted.kind == BURST:
                    found.note(served, wanted, burst(served.url, wanted))
                else:
                    found.note(served, wanted, [patiently(client, served.url, wanted)])

    threads = [threading.Thread(target=one_client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def patiently(client: httpx.Client, url: str, wanted: Wanted) -> Reply:
    """What comes of ``wanted``, asked again each second while the queue is full, as it is during a burst."""
    content = wanted.content()
    for _ in range(MOST_TRIES):
        if wanted.hang_up_after is None:
            reply = ask(client, url, content)
        else:
            reply = ask_and_hang_up(client, url, content, wanted.hang_up_after)
        if reply.status != 429:
            break
        time.sleep(1)
    return reply


def burst(url: str, wanted: Wanted) -> list[Reply]:
    """So many at the same moment, each from a client of its own."""
    replies: list[Reply] = []
    together = threading.Barrier(wanted.count)

    def one() -> None:
        with new_client() as client:
            together.wait()
            replies.append(ask(client, url, wanted.content()))

    threads = [threading.Thread(target=one) for _ in range(wanted.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def told(served: Served, found: Soak, options: argparse.Namespace) -> dict[str, Any]:
    """All that is to be known of the run, and what of it must not be."""
    settled, end = found.at(SETTLED), found.at(END)
    status = served.ask("/v1/vlfit/status")
    verdicts = [words_of(wanted, reply) for wanted, reply in found.wrong]
    if len(found.replies) < found.asked:
        verdicts.append(f"{len(found.replies)} of {found.asked} requests were made in the time there was")
    if settled is None or end is None:
        verdicts.append("too few requests were made: nothing is known of memory")
    else:
        least, most = served.watched.since(settled.seconds)
        if options.device != "cpu" and (most - least >= FLAT or abs(end.card - settled.card) >= FLAT):
            verdicts.append(f"the card's memory moved between {least / MIB:.1f} and {most / MIB:.1f} MiB")
        if (grown := end.resident - settled.resident) >= MOST_RESIDENT_GROWTH:
            verdicts.append(f"the server's RAM grew by {grown / MIB:.0f} MiB")
    verdicts += left_over(status)
    whole = [reply for wanted, reply in found.replies if reply.status == 200 and reply.ended != HUNG_UP]
    seconds = served.seconds - served.ready_s - 2 * SETTLING
    return {
        "outcomes": outcomes(found),
        "verdicts": verdicts,
        "seconds": round(seconds, 1),
        "tokens": sum(reply.tokens for _, reply in found.replies),
        "answer_s": spread([reply.seconds for reply in whole]),
        "memory": {
            "moments": [asdict(each) | {"files": each.files} for each in found.moments],
            "card": {
                each.name: served.watched.since(each.seconds)
                for each in found.moments
                if each.name not in ("", END)
            },
            "card_peak": served.watched.peak,
            "resident_peak": served.watched.peak_resident,
            "growth": [growth(before, end) for before in (found.at(READY), settled) if before and end],
        },
        "status": {name: status[name] for name in ("requests", "tokens", "steps", "kv_blocks", "places")},
        "ledger": served.ask("/v1/vlfit/ledger"),
    }


def outcomes(found: Soak) -> dict[str, dict[str, int]]:
    """By kind of request, how often each end came."""
    counted: dict[str, Counter[str]] = {}
    for wanted, reply in found.replies:
        counted.setdefault(wanted.kind, Counter())[f"{reply.status} {reply.ended}"] += 1
    return {kind: dict(counts) for kind, counts in sorted(counted.items())}


def left_over(status: dict[str, Any]) -> Iterator[str]:
    """What nobody should have any more when all requests are over."""
    if failed := status["requests"]["failed"]:
        yield f"{failed} requests failed inside the engine"
    for name in ("running", "waiting"):
        if count := status["requests"][name]:
            yield f"{count} requests are still {name}"
    if taken := status["places"]["taken"]:
        yield f"{taken} places are still taken"
    blocks = status["kv_blocks"]
    if blocks["used"] > blocks["known"]:
        yield f"{blocks['used'] - blocks['known']} KV blocks are held by nobody"


def words_of(wanted: Wanted, reply: Reply) -> str:
    return f"{wanted.kind}: {reply.status} {reply.ended}, {reply.tokens} tokens; {reply.message[:300]}"


def spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    parts = statistics.quantiles(values, n=20)
    return {"median": round(statistics.median(values), 3), "of_20_the_slowest": round(parts[-1], 3)}


def print_result(result: dict[str, Any], found: Soak, served: Served) -> None:
    ends = sorted({end for counts in result["outcomes"].values() for end in counts})
    rows = [["requests", *ends]]
    rows += [
        [kind, *(str(counts.get(end, "")) for end in ends)] for kind, counts in result["outcomes"].items()
    ]
    print_rows(rows)
    print("\nMiB")
    print_rows(table(found.moments))
    for words in result["memory"]["growth"]:
        print(words)
    for name, (least, most) in result["memory"]["card"].items():
        print(f"card since {name}: {in_mib(least)} to {in_mib(most)} MiB")
    print(
        f"\n{sum(sum(counts.values()) for counts in result['outcomes'].values())} requests, "
        f"{result['tokens']} tokens heard in {result['seconds']:.0f} s; answers {result['answer_s']}"
    )
    for words in result["verdicts"]:
        print(f"WRONG: {words}")
    if result["verdicts"]:
        print(served.words(12), file=sys.stderr)


if __name__ == "__main__":
    main()
