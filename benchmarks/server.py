"""What HTTP adds to the engine, and 64 clients at once.

    python -m benchmarks.server                          mini on the CPU: both
    python -m benchmarks.server --model FOLDER --device cuda --clients 0

**Added**: one client streams answers of ``--tokens`` tokens. Each tells how long the engine took for the
first token and for the last (``vlfit.timings``: from when the request was read, decoding of pictures
included), and what the client waited beyond that is HTTP's: its parsing, its threads, its sockets. That it
slows the engine down would not be seen there, so the engine also runs in this process, in turns with the
server, and the time of a token is compared. **Clients**: ``--clients`` of them ask ``--rounds`` times each,
all at once; the slowest client's time over the fastest's, errors, and the server's RAM before and after are
told.

Exit code 1 if HTTP adds more than 3 ms to the first token or 0.15 ms to each, if a client had an error, if
the slowest took three times the fastest, or if RAM grew by 50 MiB. On a machine with other work a wait is
that of the scheduler, most of all for the first token, which several threads hand on.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.facts import commit
from benchmarks.measure import MIB
from benchmarks.served import Served
from vlfit.api.conversation import ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend

MOST_FIRST_MS, MOST_TOKEN_MS = 3.0, 0.15
MOST_UNFAIR = 3.0
MOST_GROWTH = 50 * MIB
QUESTION = "Say something about the sea, the land and the sky."


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer, in seconds from sending: ``first`` and ``last`` as the client had them, ``engine_*`` as the
    engine tells.
    """

    first: float
    last: float
    engine_first: float
    engine_last: float
    tokens: int

    @property
    def added_first(self) -> float:
        return self.first - self.engine_first

    @property
    def added_token(self) -> float:
        """Beyond the first; the sum of what is added to each, over their number."""
        return (self.last - self.first - (self.engine_last - self.engine_first)) / max(self.tokens - 1, 1)

    @property
    def engine_token(self) -> float:
        return (self.engine_last - self.engine_first) / max(self.tokens - 1, 1)


def stream(url: str, tokens: int) -> Streamed:
    """One request over a connection that is there already, read with as little of Python as can be."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((str(host), int(port or 80))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = json.dumps(
            {
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "loop_guard": False,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
        began = time.perf_counter()
        connection.sendall(head.encode() + content)
        pieces: list[bytes] = []
        first = last = 0.0
        while b"[DONE]" not in b"".join(pieces[-2:]):
            piece = connection.recv(65536)
            if not piece:
                raise ConnectionError(b"".join(pieces).decode("utf-8", "replace")[-300:])
            now = time.perf_counter() - began
            pieces.append(piece)
            if not first and b'"content":"' in b"".join(pieces).replace(b'"content":""', b""):
                first = now
            if b'"finish_reason":"length"' in piece:
                last = now
    lines = b"".join(pieces).decode().split("data: ")
    told = next(json.loads(line.split("\n")[0]) for line in lines if '"usage":{' in line)
    timings = told["vlfit"]["timings"]
    return Streamed(
        first, last, timings["first_token_s"], timings["total_s"], told["usage"]["completion_tokens"]
    )


def in_process(backend: NativeBackend, tokens: int) -> Streamed:
    """The same request without HTTP."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, loop_guard=False)
    answer = backend.stream(ask(QUESTION), sampling).answer()
    timings = answer.timings
    assert timings is not None
    return Streamed(timings.first_token_s, timings.total_s, timings.first_token_s, timings.total_s, tokens)


def added(url: str, backend: NativeBackend, options: argparse.Namespace) -> dict[str, float]:
    served, alone = [], []
    for turn in range(options.repeats + 1):
        found = stream(url, options.tokens), in_process(backend, options.tokens)
        if turn:  # the first of each warms up
            served.append(found[0])
            alone.append(found[1])
    ms = 1000 * statistics.median(each.added_first for each in served)
    return {
        "added_first_ms": round(ms, 3),
        "added_token_ms": round(1000 * statistics.median(each.added_token for each in served), 4),
        "token_ms_in_process": round(1000 * statistics.median(each.engine_token for each in alone), 4),
        "token_ms_served": round(1000 * statistics.median(each.engine_token for each in served), 4),
    }


async def many(url: str, options: argparse.Namespace) -> tuple[list[float], list[str]]:
    """Seconds of each client for all its rounds, and what went wrong."""
    wrong: list[str] = []
    wish = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "ignore_eos": True}

    async def client(http: httpx.AsyncClient, number: int) -> float:
        began = time.perf_counter()
        for _ in range(options.rounds):
            try:
                answer = await http.post(f"{url}/v1/chat/completions", json={**wish, "seed": number})
                if answer.status_code != 200:
                    wrong.append(f"{answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                wrong.append(repr(error))
        return time.perf_counter() - began

    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as http:
        times = await asyncio.gather(*(client(http, number) for number in range(options.clients)))
    return list(times), wrong


def crowd(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    pid = int(served.ask("/v1/vlfit/status")["pid"])
    asyncio.run(many(served.url, options))  # memory counts from here on
    before = settled(pid)
    times, wrong = asyncio.run(many(served.url, options))
    after = settled(pid)
    return {
        "clients": options.clients,
        "errors": len(wrong),
        "first_error": wrong[0] if wrong else "",
        "slowest_over_fastest": round(max(times) / min(times), 3),
        "seconds": round(max(times), 2),
        "ram_growth_mib": round((after - before) / MIB, 1),
    }


def settled(pid: int) -> int:
    """RAM of a process, in bytes, a moment after the last answer: heaps are trimmed then."""
    time.sleep(2.5)
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        how = row["how"]
        if row.get("added_first_ms", 0) > MOST_FIRST_MS:
            found.append(f"{how}: the first token waits {row['added_first_ms']} ms for HTTP")
        if row.get("added_token_ms", 0) > MOST_TOKEN_MS:
            found.append(f"{how}: a token waits {row['added_token_ms']} ms for HTTP")
        if row.get("errors"):
            found.append(f"{how}: {row['errors']} errors, the first: {row['first_error']}")
        if row.get("slowest_over_fastest", 1) >= MOST_UNFAIR:
            found.append(
                f"{how}: the slowest client took {row['slowest_over_fastest']} times the fastest's time"
            )
        if row.get("ram_growth_mib", 0) * MIB > MOST_GROWTH:
            found.append(f"{how}: RAM grew by {row['ram_growth_mib']} MiB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with NativeBackend.load(options.model, EngineOptions(device=options.device)) as backend:
        for how, extra in (("in one process", []), ("apart (--restart)", ["--restart"])):
            with Served([options.model, "--device", options.device, *extra], None) as served:
                rows.append({"how": how, **added(served.url, backend, options)})
                print(json.dumps(rows[-1]))
    if options.clients:
        arguments = [options.model, "--device", options.device, "--sequences", "8", "--queue", "64"]
        with Served(arguments, None) as served:
            rows.append({"how": f"{options.clients} clients", **crowd(served, options)})
            print(json.dumps(rows[-1]))
    found = verdicts(rows)
    print("\n".join(found) or "all within the limits")
    if options.json:
        facts = {"commit": commit(), "rows": rows, "verdicts": found}
        options.json.write_text(json.dumps(facts, indent=1), "utf-8")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
