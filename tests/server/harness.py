"""A real server on a real socket in a thread, around any backend."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from openai import OpenAI

from vlfit.backends.base import LocalBackend
from vlfit.server.address import bind
from vlfit.server.app import create_app
from vlfit.server.heads import HeadsInTime
from vlfit.server.settings import ServerSettings


@dataclass
class Running:
    host: str
    port: int
    server: uvicorn.Server
    loop_thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def openai(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

    def socket(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=10)


@contextmanager
def running(
    backend: LocalBackend, settings: ServerSettings | None = None, port: int = 0
) -> Iterator[Running]:
    """Serve ``backend`` for as long as the block lasts, on a free port unless one is given."""
    listener = bind("127.0.0.1", port)
    config = uvicorn.Config(
        create_app(backend, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=HeadsInTime,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    host, port = listener.getsockname()[:2]
    try:
        yield Running(host, port, server, thread)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Returns once ``condition`` holds; fails the test if it does not in time."""
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "waited in vain"
        time.sleep(0.005)
