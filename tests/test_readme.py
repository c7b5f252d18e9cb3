"""The README's examples run: its Python with mini, its command lines against the program's options."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.main import get_command

from tests.programs import Program, run_program
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
    process = Program("serve", "mini", "--port", "0", "--json", "--quiet", stdout=subprocess.PIPE)
    try:
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


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", command_lines())
def test_the_command_lines_in_the_readme_are_what_the_program_takes(line: str) -> None:
    _, name, *arguments = shlex.split(line.split(" > ")[0])
    command = COMMANDS[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= known
    command.make_context(name, arguments)


def test_the_table_for_8_gb_is_what_was_measured() -> None:
    """And says of which commit it is."""
    measured = json.loads((ROOT / "benchmarks" / "measured" / "memory-h200.json").read_text("utf-8"))
    assert f"commit {measured['facts']['commit']}" in README
    held = [f"{row['peak'] / 2**20:,.0f} MiB" for row in measured["rows"]]
    assert re.findall(r"\| ([\d,]+ MiB) \|$", README, re.MULTILINE) == held


ENDLESS = ("serve", "top")  # until Ctrl-C
NOT_HERE = {  # what this computer lacks, and a word of the one line that says so
    "vlfit caption photo.jpg --model 4B": "vlfit pull",
}


@pytest.fixture
def newcomer(tmp_path: Path) -> dict[str, str]:
    """The environment of a home with nothing in it but the files that the README names."""
    for name in ("photo.jpg", "table.jpg"):
        shutil.copy(PICTURES[0], tmp_path / name)
    shutil.copytree(ROOT / "examples" / "pictures", tmp_path / "holiday")
    shutil.copy(ROOT / "tests" / "golden" / "logs" / "vllm-no-room.log", tmp_path / "vllm.log")
    others = {name: value for name, value in os.environ.items() if not name.startswith(("VLFIT_", "HF_"))}
    home = dict.fromkeys(("HOME", "HF_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"), str(tmp_path))
    return others | home | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLFIT_PORT": "9"}


@pytest.mark.parametrize("line", command_lines())
def test_the_command_lines_in_the_readme_run(line: str, newcomer: dict[str, str], tmp_path: Path) -> None:
    """Each works with mini, or says what is missing."""
    _, name, *arguments = shlex.split(line)
    if line not in NOT_HERE:
        newcomer["VLFIT_MODEL"] = "mini"
    if name == "serve":
        newcomer["VLFIT_PORT"] = "0"
    if name in ENDLESS:
        code, out, err = interrupted([name, *arguments], newcomer, tmp_path)
    else:
        done = run_program(name, *arguments, env=newcomer, cwd=tmp_path)
        code, out, err = done.returncode, done.stdout, done.stderr
    if line in NOT_HERE and code:
        assert code == 1
        assert NOT_HERE[line] in err
    else:
        # The doctor's checks are of this computer; `top` without a server ends by itself or by the signal.
        expected = {"doctor": (0, 1), "top": (0, 130, -signal.SIGINT)}.get(name, (0,))
        assert code in expected, err
        assert name in (*ENDLESS, "chat") or out or (tmp_path / "captions.jsonl").stat().st_size


def interrupted(words: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
    """Exit code and output of a command that is interrupted once it is ready."""
    pipe = subprocess.PIPE
    process = Program(*words, stdout=pipe, stderr=pipe, cwd=folder, env=environment)
    stream = process.stderr if words[0] == "serve" else process.stdout
    assert any("ready: mini" in text or "no server" in text for text in stream)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode is not None
    return process.returncode, out, err


def test_a_batch_and_a_server_without_a_model_say_so(newcomer: dict[str, str], tmp_path: Path) -> None:
    newcomer["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]  # this processor has been measured before
    for arguments in (["batch", "holiday/", "-o", "captions.jsonl"], ["serve"]):
        done = run_program(*arguments, env=newcomer, cwd=tmp_path)
        assert done.returncode == 2
        assert "-m mini" in done.stderr


def run_mini(command: str, *arguments: str) -> str:
    done = run_program(command, "--model", "mini", "--quiet", *arguments, cwd=ROOT)
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
