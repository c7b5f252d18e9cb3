"""Programs that people use with OpenAI's API, against a server with mini: ``make test-clients``.

They are heavy, and want different versions of the same packages, so each has an environment of its own in
``.venv/clients``; without it its test is skipped.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv" / "clients"
PICTURE = ROOT / "examples" / "pictures" / "number-25.png"

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with (
        NativeBackend.load(
            "mini", EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
        ) as backend,
        running(backend, ServerSettings()) as running_server,
    ):
        yield running_server


@pytest.mark.parametrize("name", ["langchain-openai", "llm", "litellm"])
def test_a_client_works(request: pytest.FixtureRequest, name: str) -> None:
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip("run make test-clients")
    server: Running = request.getfixturevalue("server")
    script = Path(__file__).with_name(f"with_{name.partition('-')[0]}.py")
    ended = subprocess.run(
        [python, script, f"{server.url}/v1", PICTURE], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().endswith("fine")
