"""Anthropic's own packages against a server with mini: ``make test-clients``.

The environments are those of ``test_ollama_clients.py``.
"""

import json
import shutil

import pytest

from tests.clients.mini_server import ENVIRONMENTS, PICTURE, SCRIPTS, check
from tests.server.harness import Running
from vlfit.server.anthropic.anthropic_schema import FIELDS

pytestmark = pytest.mark.clients


def test_the_python_package_works(request: pytest.FixtureRequest) -> None:
    python = ENVIRONMENTS / "anthropic" / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("client_server")
    check([str(python), str(SCRIPTS / "with_anthropic.py"), server.url, str(PICTURE), json.dumps(FIELDS)])


def test_the_npm_package_works(request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), ENVIRONMENTS / "npm"
    if node is None or not (folder / "node_modules" / "@anthropic-ai").exists():
        pytest.skip("needs node: run make test-clients")
    # Modules are looked up from where the script lies.
    script = shutil.copy(SCRIPTS / "npm" / "with_anthropic.mjs", folder)
    server: Running = request.getfixturevalue("client_server")
    check([node, str(script), server.url, str(PICTURE)])
