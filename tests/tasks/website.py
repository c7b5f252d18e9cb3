"""A website on loopback, of pictures and of everything that can go wrong."""

import contextlib
import gzip
import time
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

from tests.pictures import picture

PNG = picture(64, 48)


class Site(BaseHTTPRequestHandler):
    """A website of pictures and of everything that can go wrong."""

    hosts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        path, _, rest = self.path[1:].partition("?")
        if path == "picture.png":
            self.answer(200, PNG, "image/png")
        elif path == "page":
            self.answer(200, b"<!doctype html><html>hello</html>", "text/html")
        elif path == "json":
            self.answer(200, b'{"error": "no"}', "application/json")
        elif path == "packed":
            headers = {"Content-Encoding": rest.replace("+", ", ")}
            self.answer(200, gzip.compress(gzip.compress(PNG)), "image/png", headers)
        elif path == "nothing":
            self.answer(200, b"", "image/png")
        elif path.isdigit():
            self.answer(int(path), b"sorry", "text/plain")
        elif path == "redirect":
            self.answer(302, b"", "text/plain", {"Location": rest})
        elif path == "loop":
            self.answer(301, b"", "text/plain", {"Location": "/loop"})
        elif path == "huge":
            self.send_response(200)
            self.send_header("Content-Length", str(10**12))
            self.end_headers()
        elif path == "endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(2**20))
        elif path == "slow":
            time.sleep(3)
        elif path == "drip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"\x89")
                    time.sleep(0.1)
        elif path == "dripping-head":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
        elif path == "gibberish":
            self.wfile.write(b"this is not HTTP\r\n\r\n")

    def answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return
