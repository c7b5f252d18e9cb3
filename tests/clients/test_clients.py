"""Programs that people use with OpenAI's API, against a server with mini: ``make test-clients``.

They are heavy, and want different versions of the same packages, so each has an environment of its own in
``.venv/clients`` (npm's packages share one); without it its test is skipped.
"""

import shutil

import pytest

from tests.clients.mini_server import ENVIRONMENTS, PICTURE, SCRIPTS, check
from tests.server.harness import Running

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    ("environment", "script", "path"),
    [
        ("openai", "with_openai.py", ""),
        ("langchain-openai", "with_langchain.py", "/v1"),
        ("llm", "with_llm.py", "/v1"),
        ("litellm", "with_litellm.py", ""),
    ],
)
def test_a_python_client_works(
    request: pytest.FixtureRequest, environment: str, script: str, path: str
) -> None:
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("client_server")
    check([str(python), str(SCRIPTS / script), f"{server.url}{path}", str(PICTURE)])


def test_npm_openai_works(request: pytest.FixtureRequest) -> None:
    node, folder = shutil.which("node"), ENVIRONMENTS / "npm"
    if node is None or not (folder / "node_modules" / "openai").exists():
        pytest.skip("needs node: run make test-clients")
    # Modules are looked up from where the script lies.
    script = shutil.copy(SCRIPTS / "npm" / "with_openai.mjs", folder)
    server: Running = request.getfixturevalue("client_server")
    check([node, str(script), server.url, str(PICTURE)])
