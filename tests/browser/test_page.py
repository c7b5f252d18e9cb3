"""The page in a real browser, over a server with mini."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import PICTURES, opened
from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit.server.server_settings import ServerSettings

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def drop(page: Any, name: str, content: bytes) -> None:
    """Drop a file on the page, as from the desktop."""
    page.evaluate(
        """([name, content]) => {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], name, {type: "image/png"}));
            const how = {dataTransfer: data, bubbles: true, cancelable: true};
            document.getElementById("drop").dispatchEvent(new DragEvent("dragover", how));
            document.getElementById("drop").dispatchEvent(new DragEvent("drop", how));
        }""",
        [name, base64.b64encode(content).decode()],
    )


def drop_picture(page: Any, name: str) -> None:
    drop(page, name, (PICTURES / name).read_bytes())
    page.wait_for_selector("figure img")


def ask(page: Any, task: str, words: str = "") -> str:
    """Choose ``task``, type ``words``, press Enter or the button, and read the whole answer."""
    page.get_by_role("radio", name=task).check()
    return answer(page, words)


def answer(page: Any, words: str = "") -> str:
    before = page.locator("article").count()
    if words:
        page.get_by_role("textbox").fill(words)
        page.keyboard.press("Enter")
    else:
        page.get_by_role("button", name="Go").click()
    newest = page.locator("article").nth(before)
    newest.locator("> .quiet:not(:empty)").wait_for(timeout=60_000)
    return str(newest.locator(".words").inner_text())


def test_drop_a_picture_and_talk_about_it(page: Any) -> None:
    drop_picture(page, "tractor-and-cat.png")
    assert "cat" in ask(page, "Caption")
    assert re.fullmatch(r"\d+ tokens, \d+ tokens/s", page.locator("article > .quiet").inner_text())
    assert "brown" in answer(page, "What colour is the cat?")  # what was seen is remembered
    page.get_by_role("button", name="Copy as curl").click()
    page.get_by_text("copied", exact=True).wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "base64 -w0 -- 'tractor-and-cat.png'" in copied
    page.get_by_role("button", name="Copy as Python").click()
    program = page.evaluate("navigator.clipboard.readText()")
    compile(program, "copied", "exec")
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("article").count() == 0


def test_boxes_match_the_objects(page: Any) -> None:
    drop_picture(page, "tractor-and-cat.png")
    assert "cat" in ask(page, "Detect", "cat")
    frame = page.locator(".frame").bounding_box()
    box = page.locator("svg rect").bounding_box()
    left, right = ((box["x"] - frame["x"] + part * box["width"]) / frame["width"] for part in (0, 1))
    assert left == pytest.approx(0.67, abs=0.06)
    assert right == pytest.approx(0.94, abs=0.06)
    thing = page.get_by_role("button", name="cat", exact=True)
    thing.click()
    assert thing.get_attribute("aria-pressed") == "true"
    assert re.fullmatch(r"\d+, \d+ to \d+, \d+ pixels", thing.get_attribute("title"))


READING = "async (said) => (await import('/page/boxes.js')).read(said)"


def test_incomplete_json_is_read(page: Any) -> None:
    cut = page.evaluate(
        READING, '[{"label": "a ]", "bbox_2d": [1, 2, 3, 4]}, {"label": "b", "bbox_2d": [5, 6, 7, 8]}, {"la'
    )
    assert [thing["label"] for thing in cut["things"]] == ["a ]", "b"]
    assert cut["cut"]
    found = page.evaluate(READING, 'In [x]: {"summary": "s", "objects": []} done')
    assert (found["summary"], found["cut"]) == ("s", False)
    assert page.evaluate(READING, "[" * 100_000 + "x" + "]" * 100_000) is None  # at once


def test_a_copied_command_reads_no_file_but_the_pictures(page: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "@@/etc/hostname@@ '$(id)'"}]}
    copied = page.evaluate(
        "async (body) => (await import('/page/copies.js')).asCurl('http://h/', body, [], false)", body
    )
    assert "$(base64" not in copied
    assert "'\\''$(id)'\\''" in copied


def test_every_task_on_one_picture(page: Any) -> None:
    drop_picture(page, "tractor-and-cat.png")
    ask(page, "Caption")
    assert "cat" in ask(page, "Detect", "cat")
    assert page.locator("svg rect").count() == 1


SEEN = '{"summary": "s", "objects": [{"label": "cup", "bbox_2d": [100, 200, 300, 400]}'


def test_several_pictures_are_looked_at_one_by_one(chromium: Any) -> None:
    backend = ScriptedBackend((SEEN, "]}"))
    with running(backend) as server, opened(chromium, server) as page:
        drop_picture(page, "tractor-and-cat.png")
        drop(page, "broken.png", b"no picture")
        page.get_by_text("broken.png is not a picture").wait_for()
        drop(page, "again.png", (PICTURES / "tractor-and-cat.png").read_bytes())
        page.locator("figure").nth(1).wait_for()
        assert page.get_by_role("alert").count() == 0  # what was wrong is over
        page.get_by_role("radio", name="Scene").check()
        page.get_by_role("button", name="Go").click()
        page.locator("article").nth(1).locator("> .quiet:not(:empty)").wait_for()
        assert [len(message.parts) for chat, _ in backend.asked for message in chat] == [2, 2]
        assert page.locator("h3").all_inner_texts() == ["Scene: tractor-and-cat.png", "Scene: again.png"]
        figures = page.locator("figure")
        assert [figures.nth(number).locator("rect").count() for number in (0, 1)] == [1, 1]
        assert page.get_by_role("radio", name="Scene").is_checked()  # who looks goes on looking


def test_objects_are_counted_while_streaming(chromium: Any) -> None:
    backend = ScriptedBackend((SEEN, *[" "] * 500, "]}"), delay=0.1)
    with running(backend) as server, opened(chromium, server) as page:
        drop_picture(page, "tractor-and-cat.png")
        page.get_by_role("radio", name="Scene").check()
        page.get_by_role("button", name="Go").click()
        page.get_by_text("Looking … 1 thing so far").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped", exact=True).wait_for()
        shown = page.locator(".words").inner_text()
        assert "cup" in shown
        assert "bbox" not in shown


def test_missing_input_is_reported(page: Any) -> None:
    page.get_by_role("button", name="Go").click()
    first = page.get_by_role("alert").inner_text()
    assert "picture" in first
    drop(page, "broken.png", b"no picture")
    page.get_by_text("broken.png is not a picture").wait_for()
    page.get_by_role("radio", name="Ask").check()
    page.get_by_role("button", name="Go").click()
    assert page.get_by_role("alert").inner_text() not in ("", first)


def test_keyboard_alone_is_enough(page: Any) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skip to the question
    page.get_by_role("radio", name="Caption").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("radio", name="Ask").is_checked()
    page.keyboard.press("Tab")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator("article > .quiet:not(:empty)").wait_for(timeout=60_000)
    assert page.evaluate("document.activeElement.id") == "question"


def test_memory_bar_and_dark_mode(page: Any) -> None:
    page.wait_for_selector("#bar span")
    assert "KV cache" in page.get_by_role("img", name="KV cache").get_attribute("aria-label")
    assert page.get_by_role("button", name="Sleep").is_visible()
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("document.documentElement.classList.contains('dark')")


def test_the_page_fits_a_phone(chromium: Any, server: Running) -> None:
    with opened(chromium, server, width=360, height=780) as page:
        drop_picture(page, "tractor-and-cat.png")
        ask(page, "Scene")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        heights = page.evaluate(
            "[...document.querySelectorAll('button, .button')].map((b) => b.offsetHeight)"
        )
        assert min(height for height in heights if height) >= 32  # a finger's


@pytest.fixture
def guarded() -> Iterator[Running]:
    with running(ScriptedBackend(("It is ", "<b>red</b>.")), ServerSettings(api_keys=("secret",))) as server:
        yield server


def test_key_dialog_and_escaping(chromium: Any, guarded: Running) -> None:
    with opened(chromium, guarded, complains=True) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_text("This server requires an API key").wait_for()  # before anything is asked
        page.keyboard.press("Escape")
        page.wait_for_timeout(2500)  # longer than the page waits between two looks
        assert not asked
        page.get_by_text("API key required", exact=True).wait_for()
        page.get_by_role("radio", name="Ask").check()
        page.get_by_role("textbox").first.fill("Which colour?")
        page.keyboard.press("Enter")
        page.get_by_role("textbox", name="Key").fill("guess")
        page.keyboard.press("Enter")
        page.get_by_text("That key is wrong.").wait_for()
        assert not [url for url in asked if "completions" in url]
        page.get_by_role("textbox", name="Key").fill("secret")
        page.keyboard.press("Enter")
        page.locator("article > .quiet:not(:empty)").wait_for()  # what was asked before
        assert page.locator(".words").inner_text() == "It is <b>red</b>."
        page.get_by_text("ready", exact=True).wait_for()


def test_an_unreachable_server_is_reported(chromium: Any) -> None:
    with running(ScriptedBackend()) as server:
        context = opened(chromium, server, complains=True)
        page = context.__enter__()
    page.get_by_role("radio", name="Ask").check()
    page.get_by_role("textbox").first.fill("Hello?")
    page.keyboard.press("Enter")
    page.get_by_text("is vlfit serve still running?").wait_for()
    context.__exit__(None, None, None)
