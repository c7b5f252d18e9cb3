"""Time that a dialect adds over ``/v1``: to the first token, and to each one after it.

    python -m benchmarks.dialects                 400 rounds of text, 100 with a picture: two minutes
    python -m benchmarks.dialects --rounds 20     to see it run

A server in a process of its own has mini's tokenizer, chat template and pictures, and in place of the model a
script: the first word as soon as a request is prepared, a pause of ``PAUSE`` seconds, then all other words at
once. So the time to the first token is reading, translating, preparing and writing; the time from the first
word after the pause to the last one, over their number, is what writing a token takes. One client sends the
same request in each dialect in turn, over connections that stay open. Printed are medians of the differences
to ``/v1/chat/completions`` of the same round; ``/v1`` itself is sent twice, which shows the noise.

Exit code 1 if a dialect adds more than 0.5 ms to the first token of text or 0.02 ms to a token.
"""

import argparse
import base64
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from benchmarks.harness import (
    PICTURES,
    add_json_option,
    alternate,
    argument_parser,
    commit,
    device_name,
    print_table,
    write_json,
)
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Listener, Timings, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared, Ticket
from vlfit.backends.native import NativeBackend
from vlfit.server.app import create_app
from vlfit.server.http.listen import bind, serve_until_stopped
from vlfit.server.server_settings import ServerSettings

MAX_FIRST_MS, MAX_TOKEN_MS = 0.5, 0.02
TOKENS = 200
PAUSE = 0.01  # seconds
WORD = " xylophone"  # is not in the question
QUESTION = "Say something about the sea, the land and the sky."
PICTURE = PICTURES / "number-25.png"
END = b"0\r\n\r\n"  # of a response in chunks


# --- the server --------------------------------------------------------------------------------------------


class NeverCancelled(Ticket):
    def cancel(self) -> None:
        """No effect: the script ends by itself."""


class ScriptedWords(NativeBackend):
    """Prepares requests as the native engine does, and answers ``TOKENS`` times ``WORD`` in its place."""

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        threading.Thread(target=_speak, args=(prepared, listener), daemon=True).start()
        return NeverCancelled()


def _speak(prepared: Prepared, listener: Listener) -> None:
    usage = Usage(prepared.prompt_tokens, prepared.image_tokens, TOKENS)
    timings = Timings(0.0, 0.001, 0.01, TOKENS)
    listener(Chunk(WORD))
    time.sleep(PAUSE)
    for _ in range(TOKENS - 1):
        listener(Chunk(WORD))
    listener(Chunk("", (), "stop", usage, timings))


def _serve(parent: Connection) -> None:
    """The server's process: sends its port once connections are accepted."""
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=2)
    with ScriptedWords.load("mini", options) as backend, bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        settings = ServerSettings(context=1024)
        app = create_app(backend, settings)
        serve_until_stopped(app, [listener], settings, lambda: parent.send(port))


@contextmanager
def server() -> Iterator[int]:
    """The port of a server that runs within the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(120):
            sys.exit("the server did not start within 120 s")
        yield int(here.recv())
    finally:
        process.terminate()
        process.join(20)


# --- its client --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: from sending to the first token, and for each token after the pause."""

    first: float
    token: float


class Client:
    """A request of one dialect over a connection that stays open, read with as little Python as possible."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self) -> Times:
        """Send the request and read the whole answer.

        Raises ``ConnectionError`` if it is not the script's.
        """
        word = WORD.strip().encode()
        pieces: list[bytes] = []
        arrivals: list[tuple[float, int]] = []  # of pieces with words: when, and how many so far
        tokens = 0
        began = time.perf_counter()
        self._connection.sendall(self._request)
        while not (pieces and pieces[-1].endswith(END)):
            piece = self._connection.recv(65536)
            now = time.perf_counter() - began
            if not piece:
                break
            pieces.append(piece)
            if count := piece.count(word):
                tokens += count
                arrivals.append((now, tokens))
        if tokens != TOKENS or len(arrivals) < 3:
            raise ConnectionError(b"".join(pieces).decode("utf-8", "replace")[:600])
        first, (since, before), (until, _) = arrivals[0][0], arrivals[1], arrivals[-1]
        return Times(1000 * first, 1000 * (until - since) / (TOKENS - before))


def requests(picture: str | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of the same request in each dialect; ``picture``: base64, None: a request of text."""
    part = {"type": "text", "text": QUESTION}
    common = {"model": "mini", "temperature": 0, "stream": True, "max_tokens": TOKENS + 1}
    options = {"temperature": 0, "num_predict": TOKENS + 1}
    ollama = {"model": "mini", "stream": True, "options": options}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    image = {"type": "image", "source": source}
    images = {"images": [picture]} if picture else {}

    def messages(shown: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [shown, part] if picture else QUESTION}]

    openai = {**common, "messages": messages(url)}
    message = {"role": "user", "content": QUESTION, **images}
    return {
        "/v1/chat/completions": ("/v1/chat/completions", openai),
        "the same again": ("/v1/chat/completions", openai),
        "/api/chat": ("/api/chat", {**ollama, "messages": [message]}),
        "/api/generate": ("/api/generate", {**ollama, "prompt": QUESTION, **images}),
        "/v1/messages": ("/v1/messages", {**common, "messages": messages(image)}),
    }


# --- what is measured --------------------------------------------------------------------------------------


def measure(port: int, picture: str | None, rounds: int) -> list[dict[str, Any]]:
    """A row for each dialect: medians, and medians of the differences to the first one in each round."""
    times: dict[str, list[Times]] = {}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(Client(port, *request)) for name, request in requests(picture).items()
        }
        warm_up = max(rounds // 10, 5)
        for number, name in alternate(rounds + warm_up, list(clients)):
            one = clients[name].ask()
            if number >= warm_up:
                times.setdefault(name, []).append(one)
    rows = []
    for name in clients:
        each = times[name]
        pairs = list(zip(each, times["/v1/chat/completions"], strict=True))
        rows.append(
            {
                "request": "picture" if picture else "text",
                "route": name,
                "first_ms": statistics.median(one.first for one in each),
                "token_ms": statistics.median(one.token for one in each),
                "added_first_ms": statistics.median(one.first - other.first for one, other in pairs),
                "added_token_ms": statistics.median(one.token - other.token for one, other in pairs),
            }
        )
    return rows


def problems_of(rows: list[dict[str, Any]]) -> list[str]:
    """What exceeds a limit. The first token of a picture has none: decoding varies by more than that."""
    problems = []
    for row in rows:
        if row["request"] == "text" and row["added_first_ms"] > MAX_FIRST_MS:
            problems.append(f"{row['route']}: the first token waits {row['added_first_ms']:.3f} ms longer")
        if row["added_token_ms"] > MAX_TOKEN_MS:
            problems.append(
                f"{row['route']}, {row['request']}: a token takes {row['added_token_ms']:.4f} ms more"
            )
    return problems


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="of text; a quarter as many with a picture")
    add_json_option(parser)
    options: argparse.Namespace = parser.parse_args()
    print(f"commit {commit()}; {device_name('cpu')}; {options.rounds} rounds, {TOKENS} tokens", flush=True)
    picture = base64.b64encode(PICTURE.read_bytes()).decode()
    with server() as port:
        rows = measure(port, None, options.rounds) + measure(port, picture, max(options.rounds // 4, 5))
    table = [["request", "route", "first token, ms", "added", "a token, ms", "added"]]
    for row in rows:
        first, token = f"{row['first_ms']:.2f}", f"{row['token_ms']:.4f}"
        added = f"{row['added_first_ms']:+.3f}", f"{row['added_token_ms']:+.4f}"
        table.append([row["request"], row["route"], first, added[0], token, added[1]])
    print_table(table)
    problems = problems_of(rows)
    print("\n".join(problems) or "all within the limits")
    write_json(options.json, {"commit": commit(), "rows": rows, "problems": problems})
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
