"""Programs that people use with OpenAI's API, against a server with mini: ``make test-clients``.

They are heavy, and want other versions of what vlfit wants, so they have an environment of their own
(``.venv/clients``); without it these tests are skipped.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Running, running
from vlfit.backends.native import NativeBackend
from vlfit.engine.options import EngineOptions
from vlfit.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"
PICTURE = ROOT / "examples" / "pictures" / "number-25.png"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON.exists(), reason="run make test-clients"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with (
        NativeBackend.load("mini", EngineOptions(device="cpu", context=1024, sequences=4)) as backend,
        running(backend, ServerSettings()) as running_server,
    ):
        yield running_server


@pytest.mark.parametrize("name", ["langchain", "llm", "litellm"])
def test_a_client_works(server: Running, name: str) -> None:
    script = Path(__file__).with_name(f"with_{name}.py")
    ended = subprocess.run(
        [PYTHON, script, f"{server.url}/v1", PICTURE], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().endswith("fine")
