"""A server other than vlfit's, with scripted answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ReplyWriter = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]

WORD = {"choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
DONE = "data: [DONE]\n\n"


@contextmanager
def other_server(answering: ReplyWriter, models: object = None) -> Iterator[str]:
    """``/v1/models`` gives ``models`` (404: no such route), every POST what ``answering`` writes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "other"}]} if models is None else models).encode()
            self.send_response(200 if models != 404 else 404)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            answering(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def scripted_reply(*events: object, status: int = 200) -> ReplyWriter:
    """An answer of ``events``: text as it is, anything else as a JSON event."""

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(status)
        handler.end_headers()
        for event in events:
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            handler.wfile.write(data.encode())

    return answer


def redirect_reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A redirect."""
    handler.send_response(302)
    handler.send_header("Location", "https://elsewhere/login")
    handler.end_headers()
