"""Schemathesis over ``/openapi.json``, against a server with mini: ``make fuzz``, 15 minutes.

At least 2,000 cases for each dialect. It has an environment of its own in ``.venv/fuzz``; without it the
tests are skipped. Whatever is sent, the answer is none of 5xx, and the server is the same afterwards.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

PROGRAM = Path(__file__).parents[2] / ".venv" / "fuzz" / "bin" / "schemathesis"
LEAST_CASES = 2000


@dataclass(frozen=True)
class Dialect:
    """Routes, by a regular expression of their paths; requests are made up for ``seconds``."""

    paths: str
    seconds: int


DIALECTS = {
    "openai": Dialect(r"^/v1/(chat/|completions|embeddings|responses|models)", 200),
    "ollama": Dialect(r"^/api/", 150),
    "anthropic": Dialect(r"^/v1/messages", 300),
    "llama.cpp": Dialect(r"^/(props|slots|tokenize|detokenize|apply-template)$", 120),
}
REST = Dialect(f"^(?!{'|'.join(each.paths.lstrip('^') for each in DIALECTS.values())})", 120)

pytestmark = pytest.mark.fuzz


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*DIALECTS, "rest"])
def test_nothing_that_can_be_sent_is_a_mistake_of_ours(name: str, tmp_path: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip("run make fuzz")
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=4, max_tokens=4)
    with (
        NativeBackend.load("mini", options) as backend,
        running(backend, ServerSettings(context=512)) as server,
    ):
        cases = fuzz(server, DIALECTS.get(name, REST), tmp_path / "openapi.json")
        assert cases >= LEAST_CASES
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert backend.account().pool.used == 0


def fuzz(server: Running, dialect: Dialect, file: Path) -> int:
    """Send requests made up from the routes' descriptions; how many. None may be answered by 5xx.

    ``file``: for the descriptions, in which ``mini`` is the only name of a model: made-up ones are all 404.
    """
    described = httpx.get(f"{server.url}/openapi.json").json()
    for schema in described["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"type": "string", "enum": ["mini"]}
    file.write_text(json.dumps(described), "utf-8")
    done = subprocess.run(
        [
            *(PROGRAM, "run", file, "--url", server.url, "--checks", "not_a_server_error"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "200"),
            *("--no-shrink", "--include-path-regex", dialect.paths, "--max-time", str(dialect.seconds)),
            *("--continue-on-failure", "--seed", "7"),
            *("--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    print(done.stdout[-1500:])
    cases = re.search(r"([\d,]+) generated", done.stdout)
    assert cases is not None, done.stdout[-2000:]
    return int(cases[1].replace(",", ""))
