"""Anthropic's own packages against a server with mini: ``make test-clients``.

The environments are those of ``test_ollama_clients.py``.
"""

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.clients.test_clients import ENVIRONMENTS, PICTURE
from tests.clients.test_ollama_clients import SCRIPTS, check
from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.anthropic.anthropic_schema import FIELDS
from vlfit.server.server_settings import ServerSettings

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
    with NativeBackend.load("mini", options) as backend, running(backend, ServerSettings()) as running_server:
        yield running_server


def test_the_python_package_works(request: pytest.FixtureRequest) -> None:
    python = ENVIRONMENTS / "anthropic" / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("server")
    check([str(python), str(SCRIPTS / "with_anthropic.py"), server.url, str(PICTURE), json.dumps(FIELDS)])


def test_the_npm_package_works(request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), ENVIRONMENTS / "npm"
    if node is None or not (folder / "node_modules" / "@anthropic-ai").exists():
        pytest.skip("needs node: run make test-clients")
    # Modules are looked up from where the script lies.
    script = shutil.copy(SCRIPTS / "npm" / "with_anthropic.mjs", folder)
    server: Running = request.getfixturevalue("server")
    check([node, str(script), server.url, str(PICTURE)])
