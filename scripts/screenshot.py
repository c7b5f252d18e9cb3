"""Take docs/page.png: the web page with a scene of an example picture by mini.

make test-browser && PYTHONPATH=. .venv/bin/python scripts/screenshot.py
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.server.harness import running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend

ROOT = Path(__file__).parents[1]


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no Chromium: `make test-browser` installs it")
    options = EngineOptions(device="cpu", max_model_len=2048, max_num_seqs=2)
    with (
        NativeBackend.load("mini", options) as backend,
        running(backend) as server,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 640}, color_scheme="light")
        page.goto(server.url)
        page.set_input_files("#file", str(ROOT / "examples" / "pictures" / "tractor-and-cat.png"))
        page.get_by_role("radio", name="Scene").check()
        page.get_by_role("button", name="Go").click()
        page.locator("article > .quiet:not(:empty)").wait_for()
        page.get_by_role("radio", name="Ask").check()
        page.get_by_role("textbox").fill("What colour is the cat?")
        page.keyboard.press("Enter")
        page.locator("article:nth-of-type(2) > .quiet:not(:empty)").wait_for()
        page.wait_for_timeout(2500)  # until the page shows an idle server
        page.screenshot(path=ROOT / "docs" / "page.png")
        browser.close()


if __name__ == "__main__":
    main()
