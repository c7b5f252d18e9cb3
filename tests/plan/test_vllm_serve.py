"""The command of a plan, really started: vLLM serves mini with these flags and says what vlfit says.

Needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names. A build for CPUs will do:
flags, sizes of pictures and of the pool are the same there. What its process takes of a GPU is not seen.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.vllm_parser import PYTHON, vllm_version
from vlfit.client import VLM, Client
from vlfit.errors import VlfitError
from vlfit.machine.cards import machine_with_card
from vlfit.plan.backends import VLLM
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON"),
]
PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "animals.png"
IMAGE_TOKENS = 100  # below 144, which mini itself allows
_SERVE = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"


@pytest.fixture(scope="module")
def made() -> Plan:
    """A plan without graphs, as compiling for a CPU takes minutes."""
    version = vllm_version()
    wishes = Wishes(2048, IMAGE_TOKENS, sequences=1, backend=VLLM.name, vllm_version=version, eager=True)
    planned = find_plan(find_exact_models("mini"), machine_with_card("RTX 5060", desktop=951 * MIB), wishes)
    assert planned.fits
    return planned


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "log"


@pytest.fixture(scope="module")
def url(made: Plan, log: Path) -> Iterator[str]:
    """The URL of a server started with the plan's command; stopped with SIGINT."""
    assert made.command is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*made.command[1:], "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as said:
        server = subprocess.Popen(
            [PYTHON, "-c", _SERVE, *words],
            env={**os.environ, **made.environment, **quiet},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        place = f"http://127.0.0.1:{port}"
        _wait(server, place, log)
        yield place
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as connected:
        yield connected


def _wait(server: subprocess.Popen[bytes], place: str, log: Path) -> None:
    for _ in range(500):
        assert server.poll() is None, log.read_text("utf-8", "replace")[-3000:]
        try:
            if httpx.get(f"{place}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(log.read_text("utf-8", "replace")[-3000:])


def test_server_has_the_planned_pool(url: str, log: Path, made: Plan) -> None:
    found = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text("utf-8", "replace"))
    assert found is not None
    assert int(found[1].replace(",", "")) == VLLM.pool_tokens(made.settings)


def test_image_tokens_match_vlfit(client: Client) -> None:
    with VLM("mini", device="cpu", image_tokens=IMAGE_TOKENS) as vlm:
        ours = vlm.caption(PICTURE).text
    assert client.caption(PICTURE).text == ours


def test_huge_pictures_are_scaled_to_the_planned_tokens(client: Client) -> None:
    file = BytesIO()
    Image.new("RGB", (4096, 3072), "navy").save(file, "PNG")
    usage = client.ask("What is this?", file.getvalue(), max_tokens=1).usage
    assert IMAGE_TOKENS * 0.8 < usage.prompt_tokens < IMAGE_TOKENS + 40


def test_more_pictures_than_the_context_holds_are_refused(client: Client, made: Plan) -> None:
    most = (made.settings.context - 1) // IMAGE_TOKENS
    with pytest.raises(VlfitError, match=f"At most {most} image"):
        client.ask("What are these?", *[PICTURE] * (most + 1), max_tokens=1)
