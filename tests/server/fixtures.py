"""A server around a scripted backend: shared by a module, with the backend reset for each test.

Imported by a folder's conftest.py. A module can override ``server_settings``.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.server.scripted import ScriptedBackend

if TYPE_CHECKING:
    from openai import OpenAI

    from tests.server.harness import Running
    from vlfit.server.server_settings import ServerSettings

__all__ = ["client", "scripted", "server", "server_settings", "shared_backend", "works_afterwards"]


@pytest.fixture(scope="module")
def shared_backend() -> ScriptedBackend:
    """Which all tests of a module share: they ask for ``scripted``."""
    return ScriptedBackend()


@pytest.fixture(scope="module")
def server_settings() -> "ServerSettings | None":
    return None


@pytest.fixture(scope="module")
def server(shared_backend: ScriptedBackend, server_settings: "ServerSettings | None") -> "Iterator[Running]":
    from tests.server.harness import running  # with the openai package: not for who needs no server

    with running(shared_backend, server_settings) as running_server:
        yield running_server


@pytest.fixture
def scripted(shared_backend: ScriptedBackend) -> ScriptedBackend:
    shared_backend.reset()
    return shared_backend


@pytest.fixture(scope="module")
def client(server: "Running") -> "Iterator[OpenAI]":
    with server.openai() as client:
        yield client


@pytest.fixture
def works_afterwards(client: "OpenAI", scripted: ScriptedBackend) -> Iterator[None]:
    """Whatever went wrong, the next request is answered."""
    yield
    scripted.reset()
    answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "A red circle 🙂."
