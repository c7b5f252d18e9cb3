"""The server that all clients talk to."""

from collections.abc import Iterator

import pytest

from tests.clients.mini_server import mini_server
from tests.server.harness import Running


@pytest.fixture(scope="module")
def client_server() -> Iterator[Running]:
    with mini_server() as server:
        yield server
