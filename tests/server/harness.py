"""A real server on a real socket in a thread, around any backend."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from openai import OpenAI

from vlfit.backends.base import Backend
from vlfit.server.app import create_app
from vlfit.server.http.listen import LimitedH11Protocol, bind
from vlfit.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from vlfit.backends.native import NativeBackend


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
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def socket(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=60)


@contextmanager
def running(backend: Backend, settings: ServerSettings | None = None, port: int = 0) -> Iterator[Running]:
    """Serve ``backend`` for as long as the block lasts, on a free port unless one is given."""
    listener = bind("127.0.0.1", port)
    config = uvicorn.Config(
        create_app(backend, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=LimitedH11Protocol,
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
        thread.join(timeout=60)
        listener.close()
        assert not thread.is_alive()


def slowly(backend: "NativeBackend", monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes so long that a long answer is not done before others have done what they want to."""
    step = backend._engine_thread.engine.step

    def later() -> Any:
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(backend._engine_thread.engine, "step", later)


PATIENCE = 60.0  # seconds, which only pass where something is wrong, however busy the machine is


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once ``condition`` holds; fails the test if it never does."""
    end = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < end, "waited in vain"
        time.sleep(0.005)
