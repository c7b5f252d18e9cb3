"""A real server with mini in a thread, and pages of Debian's Chromium, which Playwright drives."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("make test-browser installs Chromium")
    with playwright.sync_playwright() as driver:
        # As root there is no sandbox; the page is our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=2048, max_num_seqs=2)
    with NativeBackend.load("mini", options) as backend, running(backend) as server:
        yield server


@contextmanager
def opened(
    chromium: Any, server: Running, width: int = 1200, height: int = 900, complains: bool = False
) -> Iterator[Any]:
    """The page, loaded. What it says in the console is a failure, unless it ``complains`` by right."""
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    page.wait_for_load_state("networkidle")
    yield page
    context.close()
    assert complains or complaints == []


@pytest.fixture
def page(chromium: Any, server: Running) -> Iterator[Any]:
    with opened(chromium, server) as page:
        yield page
