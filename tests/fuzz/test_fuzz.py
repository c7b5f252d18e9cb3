"""Schemathesis over ``/openapi.json``, against a server with mini: ``make fuzz``, nine minutes.

It has an environment of its own in ``.venv/fuzz``; without it the test is skipped. Whatever is sent, the
answer is none of 5xx, and the server is the same afterwards.
"""

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.harness import running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

PROGRAM = Path(__file__).parents[2] / ".venv" / "fuzz" / "bin" / "schemathesis"
LEAST_CASES = 2000

pytestmark = pytest.mark.fuzz


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("paths", "seconds"), [("^/(?!api/)", 330), ("^/api/", 180)], ids=["rest", "ollama"])
def test_nothing_that_can_be_sent_is_a_mistake_of_ours(paths: str, seconds: int) -> None:
    if not PROGRAM.exists():
        pytest.skip("run make fuzz")
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=4, max_tokens=4)
    with (
        NativeBackend.load("mini", options) as backend,
        running(backend, ServerSettings(context=512)) as server,
    ):
        done = subprocess.run(
            [
                *(PROGRAM, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"),
                *("--phases", "examples,coverage,fuzzing", "--max-examples", "200", "--no-shrink"),
                *("--include-path-regex", paths, "--max-time", str(seconds)),
                *("--continue-on-failure", "--seed", "7"),
                *("--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        cases = re.search(r"([\d,]+) generated", done.stdout)
        assert cases is not None, done.stdout[-2000:]
        assert int(cases[1].replace(",", "")) >= LEAST_CASES
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert backend.account().pool.used == 0
