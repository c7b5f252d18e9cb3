"""The official MCP client against ``vlfit mcp``, over stdio and HTTP: ``make test-clients``."""

import sys

import pytest

from tests.clients.mini_server import ENVIRONMENTS, PICTURE, SCRIPTS, check
from tests.server.harness import Running

pytestmark = pytest.mark.clients


def test_the_mcp_client_works(request: pytest.FixtureRequest) -> None:
    python = ENVIRONMENTS / "mcp" / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("client_server")
    check([str(python), str(SCRIPTS / "with_mcp.py"), server.url, str(PICTURE), sys.executable])
