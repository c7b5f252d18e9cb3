"""The README's examples run: its Python with mini, its command lines against the program's options."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.main import get_command

from vlfit.cli.main import app
from vlfit.errors import OutOfMemory
from vlfit.images.clips import LOW_DETAIL_TOKENS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PICTURES = sorted((ROOT / "examples" / "pictures").glob("*.*"))
A_SERVER = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run_python(program: str, folder: Path) -> str:
    """Output of ``program``, run in a folder that has a ``photo.jpg``."""
    shutil.copy(PICTURES[0], folder / "photo.jpg")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def vlfit_serve() -> Iterator[str]:
    """``vlfit serve`` with mini on a free port; its URL."""
    command = [sys.executable, "-m", "vlfit", "serve", "mini", "--port", "0", "--json", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("program", blocks("python"), ids=lambda text: text.splitlines()[0].split()[-1])
def test_the_python_in_the_readme_runs(program: str, tmp_path: Path) -> None:
    if A_SERVER not in program:
        assert run_python(program, tmp_path).strip()
        return
    with vlfit_serve() as url:
        assert run_python(program.replace(A_SERVER, url), tmp_path).strip()


def command_lines() -> list[str]:
    """The lines of the README's shell blocks that run vlfit, without their comments."""
    lines = [line.split("   #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("vlfit ")]


@pytest.mark.parametrize("line", command_lines())
def test_the_command_lines_in_the_readme_are_what_the_program_takes(line: str) -> None:
    _, name, *arguments = shlex.split(line.split(" > ")[0])
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= known
    command.make_context(name, arguments)


def run_mini(command: str, *arguments: str) -> str:
    program = [sys.executable, "-m", "vlfit", command, "--model", "mini", "--quiet", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_readme_quotes_mini() -> None:
    """The README's picture is followed by a caption and an answer: mini gives exactly these."""
    [(picture, words)] = re.findall(r'src="(examples/pictures/[^"]+)".*?\n> ([^\n]+)', README, re.DOTALL)
    assert run_mini("caption", picture) == words
    [(question, answer)] = re.findall(r'answers "([^"]+)" with "([^"]+)"', " ".join(README.split()))
    assert run_mini("ask", picture, question) == answer


def test_low_detail_and_out_of_memory_are_documented() -> None:
    words = " ".join((ROOT / "docs" / "api.md").read_text("utf-8").split())
    assert f"`low` at most {LOW_DETAIL_TOKENS} tokens (512x512 pixels)" in words
    assert LOW_DETAIL_TOKENS * 32 * 32 == 512 * 512  # a token is 32x32 pixels
    assert f"gets {OutOfMemory.http_status} with the code `{OutOfMemory.code}`" in words
