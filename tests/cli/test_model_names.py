"""Short names, and the question before a download, as a person meets them; against a hub on this computer."""

import hashlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.cli.conftest import Terminal, Vlfit
from tests.cli.test_pull import Person, hub, person
from tests.pictures import picture
from tests.programs import Program
from vlfit.checkpoint import hub as hub_files
from vlfit.cli.loading import offer_model
from vlfit.cli.models import _describe_download
from vlfit.cli.printing import Printer
from vlfit.client import choose_model
from vlfit.machine.cards import machine_with_card

__all__ = ["hub", "person"]

Tiny = Callable[[str], Path]
NAME = "Qwen/Qwen3-VL-2B-Instruct-FP8"


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(picture(64, 64, seed=1))
    return path


@pytest.fixture
def two_b(person: Person, tiny: Tiny) -> Person:
    """The hub has a small model by the name of a large one."""
    person.environment["VLFIT_HOME"] = str(person.home / "vlfit")
    person.hub.add(NAME, tiny("fp8"))
    return person


def on_a_terminal(person: Person, answer: str, *words: str, before: str = "") -> tuple[int, str, str]:
    """Exit code, stdout, and what a terminal on stdin and stderr showed; ``answer`` is typed when asked.

    ``before``: Python that runs in the process before the program.
    """
    ours, theirs = pty.openpty()
    variables = {**person.variables(), "TERM": "dumb"}
    with tempfile.TemporaryFile() as out:
        process = Program(*words, stdin=theirs, stdout=out, stderr=theirs, env=variables, before=before)
        os.close(theirs)
        shown, deadline = "", time.monotonic() + 100
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    data = os.read(ours, 4096)
                except OSError:  # Linux's way to say that nobody has the other end
                    break
                if not data:
                    break
                shown += data.decode("utf-8", "replace")
                if answer and "[Y/n]" in shown:
                    os.write(ours, answer.encode())
                    answer = ""
        code = process.wait(timeout=30)
        os.close(ours)
        out.seek(0)
        return code, out.read().decode(), shown


def downloads(person: Person) -> int:
    return len(person.hub.downloads("model.safetensors"))


def test_without_a_terminal_it_fails_with_the_command_to_type(two_b: Person, photo: Path) -> None:
    """The hub is not even asked."""
    for name in ("2B", "2B-FP8", NAME):
        failed = two_b.run("caption", str(photo), "-m", name)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert f"vlfit pull {name}" in failed.stderr
        assert "--yes" in failed.stderr
    assert two_b.hub.requests == []


def test_pull_takes_every_name_and_then_all_commands_know_it(two_b: Person) -> None:
    done = two_b.run("pull", "qwen3-vl:2b")  # no GPU: the smallest that the hub has
    assert done.returncode == 0, done.stderr
    assert two_b.names() == [NAME]
    folder = done.stdout.strip()
    for name in ("2B", "2b-fp8", f"{two_b.hub.url}/{NAME}/tree/main", "Qwen3-VL-2B-Instruct-FP8"):
        again = two_b.run("pull", name)
        assert (again.returncode, again.stdout.strip()) == (0, folder), again.stderr
    assert downloads(two_b) == 1
    removed = two_b.run("models", "rm", "2B", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert two_b.names() == []


def test_on_a_terminal_it_asks_once_and_answers(two_b: Person, photo: Path) -> None:
    words = ("caption", str(photo), "-m", "2B", "--device", "cpu", "--max-tokens", "3", "--json")
    code, out, shown = on_a_terminal(two_b, "n\n", *words)
    assert (code, out) == (1, "")
    assert "MiB" in shown
    assert "Mbit/s" in shown
    assert "vlfit pull 2B" in shown
    assert downloads(two_b) == 0

    code, out, shown = on_a_terminal(two_b, "\n", *words)
    assert code == 0, shown
    assert json.loads(out)["model"] == NAME
    assert shown.count("[Y/n]") == 1
    assert downloads(two_b) == 1

    code, _, shown = on_a_terminal(two_b, "", *words)
    assert code == 0, shown
    assert "[Y/n]" not in shown


def test_the_size_is_that_of_the_files_it_fetches(two_b: Person, photo: Path, tiny: Tiny) -> None:
    total = sum(path.stat().st_size for path in tiny("fp8").iterdir())
    repository = two_b.hub.repositories[NAME]
    repository.files["README.md"] = b"x" * 50_000_000
    code, _, shown = on_a_terminal(two_b, "n\n", "bench", "2B-FP8")
    assert code == 1
    assert f"{total / 1024**2:.1f} MiB" in shown


@pytest.mark.parametrize("how", ["option", "variable"])
def test_yes_downloads_without_asking(two_b: Person, how: str) -> None:
    typed = ["convert", "2B-FP8", "-w", "int4", *(["--yes"] if how == "option" else [])]
    variables = {"VLFIT_YES": "1"} if how == "variable" else {}
    done = two_b.run(*typed, **variables)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == two_b.home / "vlfit" / "models" / "Qwen3-VL-2B-Instruct-FP8-INT4"
    assert two_b.names() == [NAME, "Qwen3-VL-2B-Instruct-FP8-INT4"]


def test_what_was_fetched_before_is_counted(two_b: Person, tiny: Tiny) -> None:
    sha = hashlib.sha256((tiny("fp8") / "model.safetensors").read_bytes()).hexdigest()
    blobs = two_b.home / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha}.incomplete").write_bytes(bytes(1024**2))
    _, _, shown = on_a_terminal(two_b, "n\n", "bench", "2B-FP8")
    assert "1.0 MiB" in shown


def test_a_server_in_the_background_asks_before_it_starts(two_b: Person) -> None:
    for words in (("--port", "0"), ("--port", "0", "--daemon")):
        failed = two_b.run("serve", "2B-FP8", *words)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert "vlfit pull 2B-FP8" in failed.stderr
    assert two_b.hub.requests == []


def test_python_downloads_by_any_name(two_b: Person) -> None:
    program = "from vlfit import VLM; print(VLM('2B', device='cpu', context=256, sequences=1).model)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=two_b.variables(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, NAME), done.stderr


def test_a_model_that_the_hub_lacks(two_b: Person) -> None:
    code, out, shown = on_a_terminal(two_b, "y\n", "bench", "tiny/none")
    assert (code, out) == (1, "")
    assert "[Y/n]" not in shown
    assert "tiny/none" in shown


def test_offline_nobody_is_asked(two_b: Person) -> None:
    two_b.environment["HF_HUB_OFFLINE"] = "1"
    code, _, shown = on_a_terminal(two_b, "y\n", "bench", "2B-FP8")
    assert code == 1
    assert "[Y/n]" not in shown
    assert "HF_HUB_OFFLINE" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("caption", "a.png", "-m"),
        ("ask", "a.png", "What?", "-m"),
        ("detect", "a.png", "cups", "-m"),
        ("serve",),
        ("serve", "--daemon"),
        ("bench",),
        ("convert", "-w", "fp8"),
        ("pull",),
        ("plan", "--gpu", "RTX 5060"),
    ],
    ids=" ".join,
)
def test_every_command_refuses_an_unknown_name_alike(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(picture(64, 64, seed=1))
    ended = vlfit(*words, "qwn3-vl:4b")
    assert (ended.code, ended.out) == (1, "")
    assert "qwn3-vl:4b" in ended.err
    assert "Qwen/Qwen3-VL-4B-Instruct" in ended.err
    assert "Traceback" not in ended.err


# --- no model named, and none here


DESKTOP = machine_with_card("RTX 5060", 951 * 1024**2, wsl2=True)
FOUR_B = "Qwen/Qwen3-VL-4B-Instruct-FP8"


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A computer with the documents' card, and no model but mini; whatever asks a network fails."""

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "hub") if name == "HF_HUB_CACHE" else False)
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "vlfit"))
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: DESKTOP)
    monkeypatch.setattr(hub_files, "download", no_network)
    monkeypatch.setattr(hub_files, "download_size", no_network)
    return tmp_path


def offer(monkeypatch: pytest.MonkeyPatch, answer: str, *, yes: bool = False) -> tuple[str, str]:
    """The model that is opened without a name on a terminal, and what the terminal shows."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown)
    return offer_model(choose_model(), Printer(), yes=yes), shown.getvalue()


@pytest.mark.parametrize(
    ("answer", "opened"), [("\n", FOUR_B), ("y\n", FOUR_B), ("n\n", "mini"), ("", "mini")]
)
def test_the_offer_names_what_the_plan_recommends(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, opened: str
) -> None:
    started = time.monotonic()
    name, shown = offer(monkeypatch, answer)
    assert time.monotonic() - started < 10  # a second where nothing else runs
    assert name == opened
    assert shown.count("[Y/n]") == 1
    assert FOUR_B in shown
    assert "4.88 GiB" in shown
    assert "Mbit/s" in shown
    assert re.search(r"RTX 5060 .*\d+ MiB", shown)


def test_the_offer_is_made_to_nobody_without_a_terminal(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offer_model(choose_model(), Printer(), yes=False) == "mini"
    assert "vlfit pull 4B-FP8" in capsys.readouterr().err
    assert offer(monkeypatch, "", yes=True)[0] == FOUR_B


def test_offline_and_with_a_full_disk_nothing_is_offered(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "free_disk_bytes", lambda: 1024**3)
    name, shown = offer(monkeypatch, "y\n")
    assert (name, "[Y/n]" in shown) == ("mini", False)
    assert "1.00 GiB" in shown
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(empty_cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: DESKTOP)
    name, shown = offer(monkeypatch, "y\n")
    assert (name, "[Y/n]" in shown) == ("mini", False)
    assert "HF_HUB_OFFLINE" in shown


def test_a_download_that_was_begun_is_offered_with_what_is_here(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    repository = empty_cache / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "x.incomplete").write_bytes(bytes(3 * 1024**2))
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_bytes((tiny("fp8") / "config.json").read_bytes())
    name, shown = offer(monkeypatch, "y\n")
    assert name == NAME
    assert "3.0 MiB" in shown


# A computer without a GPU and with 64 GB, and of an unknown speed, whatever runs the test.
NO_GPU = """
from dataclasses import replace
import vlfit.machine.survey as survey
from vlfit.machine.model import Machine
here = survey.survey()
machine = Machine((), replace(here.host, ram_available=64 * 2**30, processor=None), ())
survey.survey = lambda: machine
"""


def test_the_offer_is_made_once_and_taken(two_b: Person, photo: Path) -> None:
    words = ("caption", str(photo), "--device", "cpu", "--max-tokens", "3", "--json")
    code, out, shown = on_a_terminal(two_b, "\n", *words, before=NO_GPU)
    assert code == 0, shown
    assert json.loads(out)["model"] == NAME
    assert shown.count("[Y/n]") == 1
    assert downloads(two_b) == 1


@pytest.mark.parametrize("words", [("serve",), ("batch", ".", "-o", "out.jsonl")])
def test_what_needs_a_real_model_names_the_recommended_one(
    empty_cache: Path, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], photo: Path
) -> None:
    monkeypatch.chdir(photo.parent)
    ended = vlfit(*words)
    assert (ended.code, ended.out) == (2, "")
    assert "vlfit pull 4B-FP8" in ended.err
    assert "-m mini" in ended.err


def test_a_list_without_models_says_which_to_pull(empty_cache: Path, vlfit: Vlfit) -> None:
    assert "vlfit pull 4B-FP8" in vlfit("models").err


@pytest.mark.parametrize("columns", range(60, 100))
def test_a_download_is_described_without_a_break_between_number_and_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _describe_download(NAME, 2_845_000_000, 0)
    shown = capsys.readouterr().err
    assert "\N{NO-BREAK SPACE}" not in shown
    assert re.search(r"\d\n|min\n", shown) is None, shown
