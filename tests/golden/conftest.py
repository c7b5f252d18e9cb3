"""Runs ``vlfit`` where nothing of this computer reaches it: no cache, setting, card or RAM of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.programs import Program
from vlfit.cli.main import main

ROOT = Path(__file__).parent.parent.parent
GIB = 1024**3
# A computer that is nobody's. A card's own facts come from the table of cards.
HOST = {
    "ram_total": 32 * GIB,
    "ram_available": 24 * GIB,
    "swap_total": 8 * GIB,
    "memory_limit": None,
    "container": False,
    "cores": 8,
    "platform": "Linux 6.8.0 x86_64",
}
Cards = Callable[..., Path]


@dataclass(frozen=True)
class Ended:
    """How a run of ``vlfit`` ended."""

    code: int
    out: str
    err: str


Vlfit = Callable[..., Ended]


def pinned(home: Path) -> dict[str, str | None]:
    """The variables that could change what is said; None: not set."""
    ours: dict[str, str | None] = {
        name: None
        for name in os.environ
        if name.startswith(("VLFIT_", "HF_", "HUGGINGFACE_", "VLLM_", "CUDA_", "TRANSFORMERS_"))
        and name != "VLFIT_REGENERATE"
    }
    xdg = ("CACHE_HOME", "STATE_HOME", "CONFIG_HOME", "DATA_HOME", "RUNTIME_DIR")
    folders = ("HOME", "HF_HOME", *(f"XDG_{name}" for name in xdg))
    return (
        ours
        | dict.fromkeys(folders, str(home))
        | dict.fromkeys(("WAYLAND_DISPLAY", "DISPLAY", "FORCE_COLOR", "PYTHONWARNINGS", "COLUMNS"))
        | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        | {"NO_COLOR": "1", "TERM": "dumb", "PATH": "/usr/bin:/bin"}
    )


def environment(home: Path) -> dict[str, str]:
    """That of a program which is started."""
    whole = {**os.environ, **pinned(home)}
    return {name: value for name, value in whole.items() if value is not None}


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _nobodys_computer(monkeypatch: pytest.MonkeyPatch, empty_home: Path, tmp_path: Path) -> None:
    from huggingface_hub import constants

    for name, value in pinned(empty_home).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(empty_home / "hub"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def vlfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vlfit:
    """``vlfit("plan", "4B")``: the program as a shell would run it, in this process."""

    def run(*words: object, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["vlfit", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def card(vlfit: Vlfit, tmp_path: Path) -> Cards:
    """``card("RTX 5060", "--wsl2")``: the name of a machine file with that card, in the current folder.

    ``copies``: so many of it in one computer.
    """

    @cache
    def save(name: str, *options: str, copies: int = 1) -> Path:
        file = Path(f"{copies}-{'-'.join([name, *options])}.json".replace(" ", "-"))
        desktop = () if "--desktop" in options else ("--desktop", "0")
        assert vlfit("machine", "--gpu", name, *options, *desktop, "--save", file, "--json").code == 0
        facts = json.loads(file.read_text("utf-8"))
        facts["host"] |= HOST | {"display": "windows" if facts["host"]["wsl2"] else "x11"}
        facts["gpus"] = [facts["gpus"][0] | {"index": index} for index in range(copies)]
        file.write_text(json.dumps(facts), "utf-8")
        return file

    return save


@pytest.fixture(scope="session")
def served(empty_home: Path) -> Iterator[str]:
    """The URL of ``vlfit serve --model mini``."""
    words = ["serve", "--model", "mini", "--port", "0", "--device", "cpu", "--dtype", "float32", "--json"]
    pipe = subprocess.PIPE
    process = Program(*words, stdout=pipe, stderr=pipe, cwd=empty_home, env=environment(empty_home))
    try:
        ready = process.stdout.readline()
        assert ready, process.communicate()[1]
        yield json.loads(ready)["url"]
    finally:
        process.kill()
        process.communicate()
