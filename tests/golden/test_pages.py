"""Pages and JSON as the program prints them, word by word, each in a file of its own under ``pages/``.

Words change on purpose: then the files are written anew (``kept.py``) and read before they are committed.
"""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.conftest import ROOT, Cards, Vlfit
from tests.golden.kept import ANEW, HERE, check
from tests.machine.nvml import DESKTOP, LARGE, WSL2, Process, install
from tests.server.harness import running
from tests.server.test_status import CARD as SERVERS_CARD
from tests.server.test_status import OnGpu
from vlfit.machine.gpu import read_gpus
from vlfit.server.admin.status import expected_memory
from vlfit.server.server_settings import ServerSettings

CARD = "--gpu 'RTX 5060' --desktop 951MiB --wsl2"  # this computer's RAM and cores, where they are shown
FILE = "--machine card.json"  # the same card in nobody's computer
VLLM = "--backend vllm --vllm-version 0.25.1"
LOGS = ("vllm-no-room", "vllm-0.32-context-too-long", "torch-out-of-memory", "ollama-buffer", "nothing-known")
COMMANDS = {
    "help": "--help",
    "machine": f"machine {FILE}",
    "machine-json": f"machine {FILE} --json",
    "machine-by-name": f"machine {CARD}",
    "machine-by-name-json": f"machine {CARD} --json",
    "machine-cards": "machine --cards",
    "machine-unknown": "machine --gpu 'RTX 9999'",
    "plan": f"plan {CARD}",
    "plan-all": f"plan --all {FILE}",
    "plan-old-card": "plan --gpu 'GTX 1660'",
    "plan-two-cards": "plan --gpu '2x RTX 3090'",
    "plan-24-gb": "plan --gpu 'RTX 4090'",
    "plan-full-card": "plan --gpu 'RTX 5060' --desktop 7GiB --wsl2",
    "plan-amd": "plan --gpu 'RX 7800'",
    "plan-intel": "plan --gpu 'Arc B580'",
    "plan-apple": "plan --gpu M3",
    "plan-4B": f"plan 4B {CARD}",
    "plan-4B-json": f"plan 4B {CARD} --json",
    "plan-8B-refused": f"plan 8B -w fp8 {CARD} --context 4096",
    "plan-8B-offload": f"plan 8B -w fp8 {FILE} --offload auto",
    "plan-compare": f"plan --compare 8B 9B mini {FILE}",
    "plan-compare-json": f"plan --compare 2B 0.8B {FILE} --json",
    "plan-what-if": f"plan 4B {FILE} --what-if",
    "plan-mini": f"plan mini {FILE}",
    "plan-text-only": f"plan Qwen/Qwen2.5-3B-Instruct {FILE}",
    "plan-vllm": f"plan 4B {FILE} {VLLM}",
    "plan-vllm-json": f"plan 4B {FILE} {VLLM} --json",
    "plan-vllm-refused": f"plan 8B -w bf16 {FILE} {VLLM}",
    "plan-vllm-two-cards": f"plan 8B -w bf16 --machine two.json {VLLM}",
    "plan-transformers": f"plan 2B {FILE} --backend transformers",
    "plan-unknown": f"plan 5B {FILE}",
    "plan-wrong-wish": f"plan Llama-2-7b-hf {FILE} --image-tokens 512",
    "plan-svg": f"plan 4B {FILE} --svg plan.svg",
    "models": "models",
    "models-json": "models --json",
    "status": "status",
    "convert-json": "convert mini -w int4 --out int4 --json --quiet",
    **{f"doctor-{log}": f"doctor {FILE} --log {log}.log" for log in LOGS},
    **{f"doctor-{log}-json": f"doctor {FILE} --log {log}.log --json" for log in LOGS[:2]},
}
ASKED = {
    "caption": "caption tractor-and-cat.png",
    "caption-json": "caption tractor-and-cat.png coffee.jpg --json",
    "caption-broken": "caption broken.png no-such.png shop.png",
    "ask": "ask shop.png 'Which word is written here?'",
    "ask-json": "ask shop.png 'Which word is written here?' --json --max-tokens 3",
    "scene": "scene number-25.png",
    "scene-json": "scene number-25.png --json",
    "detect": "detect number-25.png elephant",
    "detect-json": "detect number-25.png elephant --json",
    "batch": "batch pictures --ask 'What is this?' -o out.jsonl",
}
# The cards that ``vlfit top`` finds where no server runs.
TOP = {"top": (DESKTOP,), "top-wsl2": (WSL2,), "top-two-cards": (DESKTOP, LARGE), "top-no-gpu": ()}
TOP_OF_SERVERS = {"top-server": 6500, "top-server-crowded": 50}  # MiB free of its card
WIDTHS = {
    f"{name}-{width}": width
    for name in ("help", "plan", "plan-4B", "plan-8B-refused", "plan-old-card")
    for width in (60, 80, 200)
}
# What is of this computer or of the moment, and what stands for it.
MASKS = (
    (r'"host": \{[^}]*\}', '"host": {...}'),
    (r"\nComputer\n(?:  .*\n)+", "\nComputer\n  ...\n"),
    (r'"seconds": [\d.]+', '"seconds": ...'),
    (r'"(folder|bytes)": ("[^"]*"|[\d.]+)(?=.*"(?:sees|nearest_errors)":)', r'"\1": ...'),
    (r'(_proj": 0\.\d\d)\d*', r"\1"),
    (r"/\S+/mini\b", "/.../mini"),
    (r"You are in .*", "You are in ..."),
    (r"a larger model: .*", "a larger model: ..."),
)
MASKS_OF_TOP = (
    (r"\b\d\d:\d\d:\d\d\b", "HH:MM:SS"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r", up [\d.]+ m?s\b", ", up ... s"),
    (r"GPU: none\. (?:.+\n)+", "GPU: none. ...\n"),  # what to do depends on the computer
)
MASKS_OF_ANSWERS = (
    (r'"timings": \{[^}]*\}', '"timings": {...}'),
    (r'"cached_tokens": \d+', '"cached_tokens": ...'),  # asked before, by whichever test
    (r"[\d.]+ (?:ms|s)\b(?=.*tokens/s)", "... s"),
    (r"[\d.]+(?: tokens)?/s", ".../s"),
)


@pytest.fixture
def in_a_folder(card: Cards, tmp_path: Path) -> None:
    """With what the commands name."""
    shutil.copy(card("RTX 5060", "--desktop", "951MiB", "--wsl2"), "card.json")
    shutil.copy(card("RTX 3060 12GB", copies=2), "two.json")
    for log in LOGS:
        (source,) = (ROOT / "tests").rglob(f"logs/{log}.log")
        shutil.copy(source, f"{log}.log")
    for picture in (ROOT / "examples" / "pictures").iterdir():
        shutil.copy(picture, picture.name)
    Path("broken.png").write_bytes(b"no picture")
    Path("pictures").mkdir()
    for name in ("coffee.jpg", "shop.png"):
        shutil.copy(name, f"pictures/{name}")


def page(vlfit: Vlfit, words: str, *more: str, masks: tuple[tuple[str, str], ...] = MASKS) -> str:
    ended = vlfit(*shlex.split(words), *more)
    text = f"$ vlfit {words}\n{ended.out}"
    if ended.err:
        text += f"--- on stderr\n{ended.err}"
    for file in ("plan.svg", "out.jsonl"):
        if file in words:
            lines = Path(file).read_text("utf-8").splitlines()
            # A batch writes answers in the order in which they come.
            text += "\n".join([f"--- {file}", *(sorted(lines) if words.startswith("batch") else lines), ""])
    for pattern, instead in masks:
        text = re.sub(pattern, instead, text)
    return f"{text}--- exit {ended.code}\n"


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", COMMANDS)
def test_page(name: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no server of another test is found there
    check(f"pages/{name}.txt", page(vlfit, COMMANDS[name]))


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", ASKED)
def test_page_of_an_answer(name: str, vlfit: Vlfit, served: str) -> None:
    check(f"pages/{name}.txt", page(vlfit, ASKED[name], "--server", served, masks=MASKS + MASKS_OF_ANSWERS))


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", WIDTHS)
def test_page_on_a_terminal(name: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    width = WIDTHS[name]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")  # rich takes 80 columns for a dumb one
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = page(vlfit, COMMANDS[name.rpartition("-")[0]], masks=((r"\x1b\[[\d;]*m", ""),))
    assert max(map(len, shown.splitlines()[1:])) <= width
    check(f"pages/{name}.txt", shown)


@pytest.mark.parametrize("name", TOP)
def test_page_of_top(name: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *TOP[name], failure=None if TOP[name] else 18)
    monkeypatch.setenv("VLFIT_PORT", "9")  # where nothing listens
    check(f"pages/{name}.txt", page(vlfit, "top --once", masks=MASKS_OF_TOP))


@pytest.mark.parametrize("name", TOP_OF_SERVERS)
def test_page_of_top_beside_a_server(name: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SERVERS_CARD)
    backend = OnGpu()
    settings = ServerSettings(expectation=expected_memory(backend, read_gpus({})[0]))
    ours = Process(os.getpid(), "python", 700)
    install(monkeypatch, replace(DESKTOP, free=TOP_OF_SERVERS[name], compute=(ours,)))
    with running(backend, settings) as server:
        words = f"top --once --interval 0.3 --url {server.url}"
        check(f"pages/{name}.txt", page(vlfit, words, masks=MASKS_OF_TOP))


def test_no_page_is_left_over() -> None:
    wanted = {f"{name}.txt" for name in (*COMMANDS, *ASKED, *TOP, *TOP_OF_SERVERS, *WIDTHS)}
    left = {file.name for file in (HERE / "pages").iterdir()} - wanted
    if ANEW:
        for name in left:
            (HERE / "pages" / name).unlink()
    else:
        assert not left


def test_json_of_a_page_is_what_json_has() -> None:
    """A mask that ate half of a file would be seen here."""
    for file in (HERE / "pages").glob("*-json.txt"):
        lines = file.read_text("utf-8").splitlines()
        assert len(lines) >= 3, file.name
        assert json.loads(lines[1].replace(": ...", ": 0").replace("{...}", "{}")), file.name
