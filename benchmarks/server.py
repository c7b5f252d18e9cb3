"""Time that HTTP adds to the engine, and 64 concurrent clients.

    python -m benchmarks.server                          mini on the CPU, both parts: two minutes
    python -m benchmarks.server --model FOLDER --device cuda --clients 0
    python -m benchmarks.server --repeats 2 --clients 8 --rounds 1       to see it run
    python -m benchmarks.server --picture 1024x768 --model 2B-fp8 --device cuda --beside OTHER/src

**Added**: one client streams answers of ``--tokens`` tokens. Each answer reports when the engine had its
first and its last token (``vlfit.timings``: from when the request was read, decoding of pictures included);
what the client waited beyond that is HTTP's: parsing, threads, sockets. HTTP might also slow the engine
itself down, which would not show there: the engine also runs in this process, in turn with the server, and
the time of a token is compared. **Clients**: ``--clients`` of them send ``--rounds`` requests each, all at
once: errors, the slowest client's time over the fastest's, and the server's RAM before and after.

**Pictures** (``--picture``, instead of both): seconds to an answer of one token about a JPEG that was never
sent before, by one client and by ``--clients`` at once, from a server of this tree and, in turn with it, from
one of another version (``--beside``). Both servers run at the same time.

Exit code 1 if HTTP adds more than 3 ms to the first token or 0.15 ms to each, if a client got an error, if
the slowest took three times the fastest, or if RAM grew by 50 MiB. On a machine with other work a wait is
that of the scheduler, most of all for the first token, which several threads hand on.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    at_once,
    commit,
    process_memory,
    write_json,
)
from benchmarks.serving import ServerProcess, chat_body, data_url, new_client, random_jpeg, send
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend

MAX_FIRST_MS, MAX_TOKEN_MS = 3.0, 0.15
MAX_UNFAIRNESS = 3.0
MAX_GROWTH = 50 * MIB
QUESTION = "Say something about the sea, the land and the sky."


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds of one answer: ``first`` and ``last`` token at the client, from sending; ``engine_*``: the
    engine's own times.
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
        """To each token after the first, on average."""
        return (self.last - self.first - (self.engine_last - self.engine_first)) / max(self.tokens - 1, 1)

    @property
    def engine_token(self) -> float:
        return (self.engine_last - self.engine_first) / max(self.tokens - 1, 1)


def time_stream(url: str, tokens: int) -> StreamTimes:
    """One request over an open connection, read with as little Python as possible."""
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
    event = next(json.loads(line.split("\n")[0]) for line in lines if '"usage":{' in line)
    timings = event["vlfit"]["timings"]
    return StreamTimes(
        first, last, timings["first_token_s"], timings["total_s"], event["usage"]["completion_tokens"]
    )


def time_in_process(backend: NativeBackend, tokens: int) -> StreamTimes:
    """The same request without HTTP."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, loop_guard=False)
    answer = backend.stream(single_turn(QUESTION), sampling).answer()
    timings = answer.timings
    assert timings is not None
    return StreamTimes(timings.first_token_s, timings.total_s, timings.first_token_s, timings.total_s, tokens)


def measure_added(url: str, backend: NativeBackend, options: argparse.Namespace) -> dict[str, float]:
    served, alone = [], []
    for number in range(options.repeats + 1):
        times = time_stream(url, options.tokens), time_in_process(backend, options.tokens)
        if number:  # the first of each warms up
            served.append(times[0])
            alone.append(times[1])
    ms = 1000 * statistics.median(each.added_first for each in served)
    return {
        "added_first_ms": round(ms, 3),
        "added_token_ms": round(1000 * statistics.median(each.added_token for each in served), 4),
        "token_ms_in_process": round(1000 * statistics.median(each.engine_token for each in alone), 4),
        "token_ms_served": round(1000 * statistics.median(each.engine_token for each in served), 4),
    }


async def run_clients(url: str, options: argparse.Namespace) -> tuple[list[float], list[str]]:
    """Seconds of each client for all its rounds, and errors."""
    errors: list[str] = []
    params = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "ignore_eos": True}

    async def client(http: httpx.AsyncClient, number: int) -> float:
        began = time.perf_counter()
        for _ in range(options.rounds):
            try:
                answer = await http.post(f"{url}/v1/chat/completions", json={**params, "seed": number})
                if answer.status_code != 200:
                    errors.append(f"{answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                errors.append(repr(error))
        return time.perf_counter() - began

    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as http:
        times = await asyncio.gather(*(client(http, number) for number in range(options.clients)))
    return list(times), errors


def measure_clients(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    pid = int(server.get("/v1/vlfit/status")["pid"])
    asyncio.run(run_clients(server.url, options))  # memory counts from here on
    before = settled_memory(pid)
    times, errors = asyncio.run(run_clients(server.url, options))
    after = settled_memory(pid)
    return {
        "clients": options.clients,
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
        "slowest_over_fastest": round(max(times) / min(times), 3),
        "seconds": round(max(times), 2),
        "ram_growth_mib": round((after - before) / MIB, 1),
    }


def settled_memory(pid: int) -> int:
    """Resident bytes of a process a moment after the last answer, when heaps are trimmed."""
    time.sleep(2.5)
    return process_memory("VmRSS", pid)


def first_token_times(url: str, picture: str, clients: int, seed: int) -> list[float]:
    """Seconds to an answer of one token about a new picture, for each of ``clients`` that send at once."""
    width, height = (int(side) for side in picture.split("x"))
    bodies = [
        chat_body(QUESTION, [data_url(random_jpeg(width, height, seed + number))], max_tokens=1)
        for number in range(clients)
    ]

    def ask(body: bytes) -> float:
        with new_client() as client:
            client.get(f"{url}/health")  # connects
            began = time.perf_counter()
            reply = send(client, url, body)
        if reply.status != 200:
            raise ConnectionError(f"{reply.status} {reply.message}")
        return time.perf_counter() - began

    return at_once([partial(ask, body) for body in bodies])


def measure_pictures(servers: dict[str, ServerProcess], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of each server's first tokens with one client and with many, in turn, after two that warm up."""
    times: dict[tuple[str, int], list[list[float]]] = {}
    seed = 0
    for number in range(options.repeats + 2):
        for clients in dict.fromkeys((1, options.clients)):
            for name, server in servers.items():
                seed += clients
                each = first_token_times(server.url, options.picture, clients, seed)
                if number >= 2:
                    times.setdefault((name, clients), []).append(each)
    return [
        {
            "how": f"{name}, {clients} at once",
            "first_token_ms": round(1000 * statistics.median(t for each in rounds for t in each), 2),
            "fastest_ms": round(1000 * min(t for each in rounds for t in each), 2),
            "last_of_round_ms": round(1000 * statistics.median(max(each) for each in rounds), 2),
        }
        for (name, clients), rounds in times.items()
    ]


def run_pictures(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(checkpoint_of(options.model, Path(folder)))
        arguments = [model, "--device", options.device, "--no-speculate"]
        servers = {"this version": stack.enter_context(ServerProcess(arguments, None))}
        if options.beside:
            other = ServerProcess(arguments, None, options.beside)
            servers["the other version"] = stack.enter_context(other)
        return measure_pictures(servers, options)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    problems = []
    for row in rows:
        how = row["how"]
        if row.get("added_first_ms", 0) > MAX_FIRST_MS:
            problems.append(f"{how}: the first token waits {row['added_first_ms']} ms for HTTP")
        if row.get("added_token_ms", 0) > MAX_TOKEN_MS:
            problems.append(f"{how}: a token waits {row['added_token_ms']} ms for HTTP")
        if row.get("errors"):
            problems.append(f"{how}: {row['errors']} errors, the first: {row['first_error']}")
        if row.get("slowest_over_fastest", 1) >= MAX_UNFAIRNESS:
            problems.append(
                f"{how}: the slowest client took {row['slowest_over_fastest']} times the fastest's time"
            )
        if row.get("ram_growth_mib", 0) * MIB > MAX_GROWTH:
            problems.append(f"{how}: RAM grew by {row['ram_growth_mib']} MiB")
    return problems


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--picture", metavar="WxH", help="time first tokens of pictures of this size instead")
    parser.add_argument("--beside", type=Path, metavar="SRC", help="src folder of another version")
    add_json_option(parser)
    options = parser.parse_args()
    if options.picture:
        timed = run_pictures(options)
        for row in timed:
            print(json.dumps(row))
        write_json(options.json, {"commit": commit(), "rows": timed})
        return
    rows: list[dict[str, Any]] = []
    with NativeBackend.load(options.model, EngineOptions(device=options.device)) as backend:
        for how, extra in (("in one process", []), ("apart (--restart)", ["--restart"])):
            with ServerProcess([options.model, "--device", options.device, *extra], None) as server:
                rows.append({"how": how, **measure_added(server.url, backend, options)})
                print(json.dumps(rows[-1]))
    if options.clients:
        arguments = [options.model, "--device", options.device, "--sequences", "8", "--queue", "64"]
        with ServerProcess(arguments, None) as server:
            rows.append({"how": f"{options.clients} clients", **measure_clients(server, options)})
            print(json.dumps(rows[-1]))
    problems = verdicts(rows)
    print("\n".join(problems) or "all within the limits")
    write_json(options.json, {"commit": commit(), "rows": rows, "verdicts": problems})
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
