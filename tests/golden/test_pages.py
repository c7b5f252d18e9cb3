"""Pages and JSON as the program prints them, word by word, each in a file of its own under ``pages/``.

Words change on purpose: then the files are written anew (``kept.py``) and read before they are committed.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.golden.conftest import ROOT, Cards, Ended, Vlfit, environment
from tests.golden.kept import ANEW, HERE, check
from tests.hub import running_hub
from tests.machine.nvml import DESKTOP, LARGE, WSL2, Process, install
from tests.pictures import encoded
from tests.programs import Program, run_program
from tests.server.harness import running
from tests.server.test_status import CARD as SERVERS_CARD
from tests.server.test_status import OnGpu
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.cli.servers import running_servers
from vlfit.machine.gpu import read_gpus
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
    "plan-6GB-card": "plan --gpu 'RTX 3050 6GB'",
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
    "stop": "stop",
    "verify-wrong": "verify mini --quick --full",
    "embed-wrong": "embed",
    "search-wrong": "search pictures --paths --json",
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
    "caption-notes": "caption -v --max-tokens 1 clear.png ink.jpg deep.png turned.jpg moving.gif large.png",
    "batch": "batch pictures --ask 'What is this?' -o out.jsonl",
}
# With a model in the same process; in this order, as a later search finds the index of an earlier one.
COMPUTED = {
    "verify": "verify mini --quick --device cpu",
    "embed": "embed shop.png 'a shop' -m mini --device cpu --context 512 --dimensions 3",
    "search-new": "search pictures -m mini --device cpu --context 512",
    "search": "search pictures --like pictures/shop.png",
    "search-no-index": "search no-such-folder shop",
}
SEARCH_JSON = {"search-json": "search pictures --like pictures/shop.png -n 1 --json"}
# A server in the background, in this order.
DAEMON = {
    "serve-daemon": "serve mini --port 0 --device cpu --dtype float32 --daemon",
    "status-server": "status",
    "stop-server": "stop",
}
# What a person types, and what the program says to it.
CHAT = {"chat": "chat shop.png", "chat-json": "chat shop.png --json"}
SAID = "Which word is written here?\n/help\n/reset\n/wave\n/image no-such.png\n/quit\n"
# The cards that ``vlfit top`` finds where no server runs.
TOP = {"top": (DESKTOP,), "top-wsl2": (WSL2,), "top-two-cards": (DESKTOP, LARGE), "top-no-gpu": ()}
TOP_OF_SERVERS = {"top-server": 6500, "top-server-crowded": 50}  # MiB free of its card
SLEEP = {"sleep": "sleep", "sleep-again": "sleep", "wake": "wake", "wake-again": "wake"}  # in this order
# With its stderr, which the others have only where something is wrong.
BENCH = {"bench": "bench mini --device cpu --size 64x64 --tokens 3 --repeat 1 --batch 1,2"}
PULL = {"pull": "pull org/tiny", "pull-again": "pull org/tiny", "pull-no-such": "pull org/none"}
SERVE = {"serve": "serve mini --port 0 --device cpu --dtype float32"}
WIDTHS = {
    f"{name}-{width}": width
    for name in ("help", "plan", "plan-4B", "plan-8B-refused", "plan-6GB-card")
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
PORT = (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT")
MASKS_OF_TOP = (
    (r"\b\d\d:\d\d:\d\d\b", "HH:MM:SS"),
    PORT,
    (r", up [\d.]+ m?s\b", ", up ... s"),
    (r"GPU: none\. (?:.+\n)+", "GPU: none. ...\n"),  # what to do depends on the computer
)
MASKS_OF_ANSWERS = (
    (r'"timings": \{[^}]*\}', '"timings": {...}'),
    (r'"cached_tokens": \d+', '"cached_tokens": ...'),  # asked before, by whichever test
    (r"[\d.]+ (?:ms|s)\b(?=.*tokens/s)", "... s"),
    (r"[\d.]+(?: tokens)?/s", ".../s"),
    (r"first after [\d.]+ m?s", "first after ... s"),
)
# Of what was measured only the words are kept, in tables without the width of their columns.
MASKS_OF_NUMBERS = (
    (r"\d[\d,]*(?:\.\d+)?", "N"),
    (r"N (?:[KMG]i)?B\b", "N bytes"),
    (r"N m?s\b", "N s"),
    (r"(?<=[ |])-+:?(?=\|)|(?<=\|)-+:?", "-"),
    (r"(?<=\S) {2,}", " "),
)
MASKS_OF_BENCH = (
    (r"(?<=\nvlfit ).*\n.*", "..."),  # versions and the processor
    (r"(?<=\nstart: ).*", "..."),
    (r"(?<=\n\| ).*(?= \| - \| [\d.]+ \| mini)", "..."),
    *MASKS_OF_NUMBERS,
)
MASKS_OF_COMPUTED = (
    (r"(?m)^mini \(.*\) on .*(?=: )", "mini (...) on ..."),
    (r"(?<=nearest to its limit: ).*", "..."),
    (r"(?m)^loading.*\n", ""),  # where it takes long
    (r": slower than predicted.*", ""),  # beside other programs
    *MASKS_OF_NUMBERS,
    (r"(?<=[\[ ])-N\b", "N"),
)
MASKS_OF_SEARCH_JSON = (
    (r'(?<="index": ")[^"]*', "/.../pictures.index"),
    (r'"score": [\d.]+', '"score": ...'),
)
MASKS_OF_SERVE = (
    (r"values of .*", "values of ..."),  # depends on the processor
    (r"(?<=\nafter ).*", "..."),
    (r"localhost:\d+|127\.0\.0\.1:\d+", "HOST"),
    *MASKS_OF_NUMBERS,
)
MASKS_OF_DAEMON = (
    (r"(?<=process )\d+", "PID"),
    (r"/\S+(?=/mini\b|/[^/]+\.log\b)", "/..."),
    (r"-\d+(?=\.log\b)", "-PORT"),
    *MASKS_OF_SERVE,
)
MASKS_OF_PULL = (
    (r"(?m)^.*:   ?(?:\d|\d\d) %.*\n", ""),  # how far it is, as often as there is time to say so
    (r"http://[\w.]+:\d+", "HUB"),
    (r"/\S+/(?=hub/models--)", "/.../"),
    (r"snapshots/\w+", "snapshots/..."),
    *MASKS_OF_NUMBERS,
    (r"(?<=N bytes of N bytes).*", ""),  # a speed, if it took that long
)


def pictures_to_change() -> dict[str, bytes]:
    """Pictures that are not taken as they are, and said so with -v."""
    deep = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "green")]
    return {
        "clear.png": encoded(Image.new("RGBA", (64, 64), (255, 0, 0, 99))),
        "ink.jpg": encoded(Image.new("CMYK", (64, 64)), "JPEG"),
        "deep.png": encoded(Image.fromarray(deep)),
        "turned.jpg": encoded(Image.new("RGB", (64, 96)), "JPEG", exif=turned),
        "moving.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "large.png": encoded(Image.new("RGB", (1600, 1200))),
    }


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
    for name, data in pictures_to_change().items():
        Path(name).write_bytes(data)
    Path("pictures").mkdir()
    for name in ("coffee.jpg", "shop.png"):
        shutil.copy(name, f"pictures/{name}")


def page(vlfit: Vlfit, words: str, *more: str, masks: tuple[tuple[str, str], ...] = MASKS) -> str:
    return written(words, vlfit(*shlex.split(words), *more), masks)


def page_of_a_process(words: str, home: Path, masks: tuple[tuple[str, str], ...], **variables: str) -> str:
    """That of a command which starts others, or takes settings from the environment once, when imported."""
    ended = run_program(*shlex.split(words), env={**environment(home), **variables}, cwd=home)
    return written(words, Ended(ended.returncode, ended.stdout, ended.stderr), masks)


def written(words: str, ended: Ended, masks: tuple[tuple[str, str], ...]) -> str:
    text = ended.out
    if ended.err:
        text += f"--- on stderr\n{ended.err}"
    for file in ("plan.svg", "out.jsonl"):
        if file in words:
            lines = Path(file).read_text("utf-8").splitlines()
            # A batch writes answers in the order in which they come.
            text += "\n".join([f"--- {file}", *(sorted(lines) if words.startswith("batch") else lines), ""])
    text = f"\n{text}"
    for pattern, instead in masks:
        text = re.sub(pattern, instead, text)
    return f"$ vlfit {re.sub(*PORT, words)}{text}--- exit {ended.code}\n"


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
@pytest.mark.parametrize("name", CHAT)
def test_page_of_a_chat(name: str, vlfit: Vlfit, served: str) -> None:
    ended = vlfit(*shlex.split(CHAT[name]), "--server", served, stdin=SAID)
    check(f"pages/{name}.txt", written(CHAT[name], ended, MASKS + MASKS_OF_ANSWERS))


@pytest.mark.usefixtures("in_a_folder")
def test_pages_of_what_is_computed_here(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):  # what verify and search keep
        monkeypatch.setenv(variable, str(tmp_path / "kept"))
    for name, words in COMPUTED.items():
        check(f"pages/{name}.txt", page(vlfit, words, masks=MASKS_OF_COMPUTED))
    for name, words in SEARCH_JSON.items():
        check(f"pages/{name}.txt", page(vlfit, words, masks=MASKS_OF_SEARCH_JSON))


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


def test_pages_of_sleep(vlfit: Vlfit, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(device="cpu", max_model_len=512)
    with NativeBackend.load(tiny("tied"), options) as backend, running(backend) as server:
        monkeypatch.setenv("VLFIT_PORT", str(server.port))
        for name, words in SLEEP.items():
            check(f"pages/{name}.txt", page(vlfit, words, masks=MASKS_OF_SERVE))


@pytest.mark.parametrize("name", BENCH)
def test_page_of_bench(name: str, vlfit: Vlfit) -> None:
    check(f"pages/{name}.txt", page(vlfit, BENCH[name], masks=MASKS_OF_BENCH))


def test_pages_of_pull(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.add("org/tiny", tiny("tied"))
        for name, words in PULL.items():
            shown = page_of_a_process(words, tmp_path, MASKS_OF_PULL, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
            check(f"pages/{name}.txt", shown)


@pytest.mark.parametrize("name", SERVE)
def test_page_of_serve(name: str, empty_home: Path) -> None:
    variables = environment(empty_home) | {"VLFIT_CPU_KERNELS": "0"}
    process = Program(*SERVE[name].split(), stderr=subprocess.PIPE, cwd=empty_home, env=variables)
    try:
        told = ""
        while "curl" not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        process.send_signal(signal.SIGINT)
        told += process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()
    ended = Ended(process.wait(timeout=0), "", told)
    check(f"pages/{name}.txt", written(SERVE[name], ended, MASKS_OF_SERVE))


def test_pages_of_a_server_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # for what ends a server that was not stopped
    try:
        for name, words in DAEMON.items():
            check(f"pages/{name}.txt", page_of_a_process(words, tmp_path, masks=MASKS_OF_DAEMON))
    finally:
        for record in running_servers():
            os.kill(record.pid, signal.SIGKILL)


def test_no_page_is_left_over() -> None:
    kinds = (
        COMMANDS,
        ASKED,
        TOP,
        TOP_OF_SERVERS,
        WIDTHS,
        SLEEP,
        BENCH,
        PULL,
        SERVE,
        COMPUTED,
        SEARCH_JSON,
        DAEMON,
        CHAT,
    )
    wanted = {f"{name}.txt" for kind in kinds for name in kind}
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
