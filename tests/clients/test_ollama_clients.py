"""Programs that people use with Ollama, against a server with mini: ``make test-clients``.

Each has an environment of its own in ``.venv/clients`` (npm's packages share one); without it its test is
skipped.
"""

import json
import shutil

import pytest

from tests.clients.mini_server import ENVIRONMENTS, PICTURE, SCRIPTS, check
from tests.server.harness import Running
from vlfit.server.ollama.ollama_schema import FIELDS

pytestmark = pytest.mark.clients


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
    server: Running = request.getfixturevalue("client_server")
    check([str(python), str(SCRIPTS / script), server.url, str(PICTURE), json.dumps(FIELDS)])


def test_npm_clients_work(request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), ENVIRONMENTS / "npm"
    if node is None or not (folder / "node_modules").exists():
        pytest.skip("needs node: run make test-clients")
    # Modules are looked up from where the script lies.
    script = shutil.copy(SCRIPTS / "npm" / "with_ollama.mjs", folder)
    server: Running = request.getfixturevalue("client_server")
    check([node, str(script), server.url, str(PICTURE)])
