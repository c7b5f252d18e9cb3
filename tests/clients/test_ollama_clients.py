"""Programs that people use with Ollama, against a server with mini: ``make test-clients``.

Each has an environment of its own in ``.venv/clients`` (npm's packages share one); without it its test is
skipped.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_clients import ENVIRONMENTS, PICTURE
from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.ollama.ollama_schema import FIELDS
from vlfit.server.server_settings import ServerSettings

SCRIPTS = Path(__file__).parent

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
    with NativeBackend.load("mini", options) as backend, running(backend, ServerSettings()) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("environment", "script"),
    [
        ("ollama", "with_ollama.py"),
        ("langchain-ollama", "with_langchain_ollama.py"),
        ("llm-ollama", "with_llm_ollama.py"),
        ("litellm", "with_litellm_ollama.py"),
    ],
)
def test_a_python_client_works(request: pytest.FixtureRequest, environment: str, script: str) -> None:
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("server")
    check([str(python), str(SCRIPTS / script), server.url, str(PICTURE), json.dumps(FIELDS)])


def test_npm_clients_work(request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), ENVIRONMENTS / "npm"
    if node is None or not (folder / "node_modules").exists():
        pytest.skip("needs node: run make test-clients")
    # Modules are looked up from where the script lies.
    script = shutil.copy(SCRIPTS / "npm" / "with_ollama.mjs", folder)
    server: Running = request.getfixturevalue("server")
    check([node, str(script), server.url, str(PICTURE)])


def check(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().endswith("fine")
