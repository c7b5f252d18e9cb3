"""Every request of docs/api.md gets the answer printed below it, from mini."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.test_readme import A_SERVER, ROOT, vlfit_serve
from vlfit.cli.main import app
from vlfit.cli.options import normalize_server_arguments
from vlfit.server.openai.openai_api import OPENAI
from vlfit.server.openapi import SERVER_PATHS

API = (ROOT / "docs" / "api.md").read_text("utf-8")
# Blocks of a request and its answer. An answer may be shortened: what is printed must be in the real one.
EXAMPLES: list[tuple[str, str, str]] = re.findall(
    r"^```sh\n([^`]*?)```\n\n```(json|text)\n(.*?)```$", API, re.MULTILINE | re.DOTALL
)
# Fields that differ from run to run, and all of their numbers.
VARYING = {"id", "created", "timings", "pid", "uptime_s", "version", "actual"}
VARYING |= {"requests", "kv_blocks", "seconds", "waited_s", "freed"}
VARYING |= {"embedding"}  # its last digits differ between processors


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that has answered the page's first chat completion, which its metrics count."""
    first = next(command for command, _, _ in EXAMPLES if "/v1/chat/completions" in command)
    with vlfit_serve() as url:
        run(first, url)
        yield url


def run(command: str, url: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = re.sub(r"\bcurl\b", "curl --silent --show-error --max-time 100", command)
    done = subprocess.run(
        ["bash", "-c", command.replace(A_SERVER, url)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def assert_contains(real: Any, printed: Any, where: str = "") -> None:
    """``printed`` is ``real`` or a part of it: fewer fields, and fewer entries of lists."""
    assert type(real) is type(printed) or {type(real), type(printed)} == {int, float}, where
    if isinstance(printed, dict):
        for name, value in printed.items():
            assert name in real, f"{where}.{name}"
            if name not in VARYING:
                assert_contains(real[name], value, f"{where}.{name}")
    elif isinstance(printed, list):
        assert len(printed) <= len(real), where
        for index, value in enumerate(printed):
            others = [each for each in real if _line_of(each) == _line_of(value)]
            assert_contains(others[0] if _line_of(value) else real[index], value, f"{where}[{index}]")
    elif isinstance(printed, str) or not where.endswith((".bytes", ".total", ".planned")):
        assert real == printed, where


def _line_of(entry: Any) -> str | None:
    """The line of a ledger that ``entry`` is, by which it is found."""
    return entry.get("line") if isinstance(entry, dict) else None


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("command", "kind", "answer"), EXAMPLES, ids=lambda text: text.split("\n")[0][:60])
def test_a_request_and_its_answer(command: str, kind: str, answer: str, url: str) -> None:
    real = run(command, url)
    if kind == "json":
        assert_contains(json.loads(real), json.loads(answer))
        return
    lines = events(real)
    for printed in events(answer):
        if printed.startswith("{"):
            assert any(_is_part(line, printed) for line in lines), printed
        elif printed != "...":
            start = re.sub(r" \d+$", " ", printed)  # the value of a metric varies
            assert any(line.startswith(start) for line in lines), printed


def _is_part(line: str, printed: str) -> bool:
    try:
        assert_contains(json.loads(line), json.loads(printed))
    except (ValueError, AssertionError):
        return False
    return True


def test_every_route_has_a_request() -> None:
    commands = "\n".join(command for command, _, _ in EXAMPLES)
    routes = {path.path for path in (*OPENAI.paths, *SERVER_PATHS)}
    missing = [route for route in routes if "{" not in route and f"{A_SERVER}{route}" not in commands]
    assert len(routes) > 10
    assert not missing


def test_every_request_of_the_page_has_an_answer() -> None:
    assert len(EXAMPLES) == API.count("```sh\n") >= 17


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Files exist, and so do the headings that are linked to."""
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text("utf-8")):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {_anchor(heading) for heading in headings}, f"{target}#{anchor}"


def _anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def command_lines() -> list[tuple[str, str]]:
    """The command lines of all pages that run vlfit, each with its page: of shell blocks, and of the help."""
    lines = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text("utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        found = "".join(blocks).splitlines()
        if page.name == "cli.md":
            found = re.findall(r"^ +(vlfit .*)$", text.replace("Usage: ", ""), re.MULTILINE)
        for line in found:
            words = re.split(r" {2,}#| >>? | \| | && ", line)[0].split()
            if "vlfit" in words and words[-1] != "vlfit":
                lines.append((page.name, " ".join(words[words.index("vlfit") + 1 :])))
    return lines


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_command_lines_are_what_the_program_takes(page: str, line: str) -> None:
    name, *arguments = normalize_server_arguments(shlex.split(line))
    if name in COMMANDS:  # not a word such as "compose run vlfit"
        COMMANDS[name].make_context(name, list(arguments), resilient_parsing=False)
    else:
        assert page == "install.md", line


def test_the_recording_of_a_terminal() -> None:
    """Small, loads nothing from elsewhere, and shows what mini says (``make docs`` records it)."""
    svg = (ROOT / "docs" / "terminal.svg").read_text("utf-8")
    assert len(svg) < 200_000
    assert "url(http" not in svg
    words = svg.replace("&#160;", " ")
    (caption,) = re.findall(r"^> (.*)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert caption in words
    assert "vlfit plan" in words
