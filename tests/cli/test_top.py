"""``vlfit top`` beside a real server, beside a made-up GPU, and alone; its words are in ``tests/golden``."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Vlfit
from tests.machine.nvml import DESKTOP, LARGE, WSL2, FakeCard, Process, install
from tests.programs import Program
from tests.server.harness import running, wait_for
from tests.server.scripted import ScriptedBackend
from tests.server.test_status import CARD, OnGpu
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.cli.pages.top_page import _curve, log_line, to_json
from vlfit.cli.watcher import Watcher, local_server_url, read_status
from vlfit.errors import RemoteError
from vlfit.machine.gpu import read_gpus
from vlfit.server.http.listen import bind
from vlfit.server.server_settings import ServerSettings
from vlfit.units import MIB


@pytest.fixture(scope="module")
def mini() -> Iterator[dict[str, Any]]:
    """A real ``vlfit serve mini`` on this processor, and what it said when it was ready."""
    words = ("mini", "--port", "0", "--device", "cpu", "--context", "2048", "--json", "-q")
    with Program("serve", *words, stdout=subprocess.PIPE) as server:
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """A request runs for as long as the block lasts; afterwards nothing does."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1900,
        "ignore_eos": True,
        "loop_guard": False,
        "temperature": 0,
        "stream": True,
    }

    def running() -> int:
        return int(status()["requests"]["running"])

    def steps() -> int:
        return int(status()["steps"]["decode_count"])

    def status() -> Any:
        return httpx.get(f"{url}/v1/vlfit/status", timeout=60).json()

    before = steps()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60):
        wait_for(lambda: steps() > before)
        yield
        assert running() == 1, "it should have run all the while"
    wait_for(lambda: running() == 0)


def once(vlfit: Vlfit, *arguments: str) -> dict[str, Any]:
    ended = vlfit("top", "--once", "--json", "--interval", "0.3", *arguments)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("\n") == 1
    told: dict[str, Any] = json.loads(ended.out)
    return told


def rows_of(page: str) -> dict[str, list[str]]:
    """The words of each line but for the first, by the first; where two begin alike, of the upper one."""
    lines = [words.split() for words in page.splitlines() if words]
    return {first: rest for first, *rest in reversed(lines)}


# --- beside a real server ----------------------------------------------------------------------------------


def test_a_server_at_work(vlfit: Vlfit, mini: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=12)
    with busy(mini["url"]):
        told = once(vlfit, "--url", mini["url"])
    server = told["server"]
    assert (server["model"], server["device"]) == ("mini", "cpu")
    assert server["requests"]["running"] == 1
    assert server["kv_blocks"]["used"] > 0
    assert told["rates"]["tokens_per_s"] > 0
    assert told["rates"]["decode_step_s"] > 0
    assert (told["trouble"], told["gpus"], told["alarms"]) == ("", [], [])
    rows = {row["line"]: row for row in server["ledger"]}
    assert rows["weights.vision"]["planned"] == rows["weights.vision"]["actual"]


def test_the_page_of_a_server_on_a_processor(
    vlfit: Vlfit, mini: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, failure=12)
    ended = vlfit("top", "--once", "--interval", "0.3", "--url", mini["url"])
    assert (ended.code, ended.err) == (0, "")
    rows = rows_of(ended.out)
    head = ended.out.partition("\n")[0]
    assert (f"{mini['url']}," in head.split(), "\x1b" in ended.out) == (True, False)
    assert {"RAM,", "card,", "desktop"} & rows.keys() == {"RAM,"}  # no word of a card
    assert (rows["requests"][0], rows["requests"][2]) == ("0", "0")  # running, waiting
    assert rows["speed"][0] == "0.0"
    assert rows["weights.vision"][:3] == ["27", "27", "+0"]


def test_it_is_found_at_the_port_of_the_settings(
    vlfit: Vlfit, mini: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, failure=12)
    monkeypatch.setenv("VLFIT_PORT", mini["url"].rpartition(":")[2])
    assert once(vlfit)["server"]["model"] == "mini"
    monkeypatch.setenv("VLFIT_PORT", "")
    monkeypatch.setenv("VLFIT_SERVER", f"{mini['url']}/v1")
    assert once(vlfit)["server"]["model"] == "mini"


def test_looking_all_the_time_takes_no_step(mini: dict[str, Any]) -> None:
    with Watcher(mini["url"], None, named=True) as source:
        steps = {source.snapshot().server.facts["steps"]["count"] for _ in range(20)}  # type: ignore[union-attr]
    assert len(steps) == 1


def in_a_terminal(*arguments: str, until: str, end: signal.Signals) -> tuple[int, str]:
    """Run ``vlfit top`` on a terminal of its own until it has shown some text, then send it a signal."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = Program("top", *arguments, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    shown, sent, deadline = "", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # Linux says so when the other side is closed
                    break
                if not data:
                    break
                shown += data.decode()
            if until in shown and not sent:
                sent = True
                process.send_signal(end)
        return process.wait(timeout=60), shown
    finally:
        process.kill()
        process.wait(timeout=60)
        os.close(ours)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_left_clean(mini: dict[str, Any], end: signal.Signals) -> None:
    code, shown = in_a_terminal(
        "--url", mini["url"], "--interval", "0.2", until="speed     0.0 tokens/s", end=end
    )
    assert code == 0
    assert "\x1b[?1049h" in shown  # the other screen
    assert "\x1b[?25l" in shown  # and no cursor
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "Traceback" not in shown


def test_a_server_that_is_not_there_is_told_on_the_screen_that_stays() -> None:
    code, shown = in_a_terminal("--url", "http://127.0.0.1:9", until="never", end=signal.SIGINT)
    assert code == 1
    assert "\x1b[?1049h" not in shown
    assert "http://127.0.0.1:9" in shown
    assert "Traceback" not in shown


# --- lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_where_nobody_looks_each_look_is_a_line(mini: dict[str, Any], options: tuple[str, ...]) -> None:
    words = ("top", "--url", mini["url"], "--interval", "0.2", *options)
    with Program(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    if options:
        assert [json.loads(each)["server"]["model"] for each in lines] == ["mini"] * 3
    else:
        facts = [{each.split()[-1]: each.split() for each in line.split("  ")} for line in lines]
        assert [each["waiting"][::2] for each in facts] == [["0", "0"]] * 3  # running and waiting
        assert [each["%"][1] for each in facts] == ["0"] * 3
        assert facts[-1]["tokens/s"][0] == "0.0"


def test_a_server_that_goes_away_is_no_end_of_looking(tiny: Callable[[str], Path]) -> None:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=1)
    with (
        NativeBackend.load(tiny("tied"), options) as backend,
        running(backend) as server,
        Watcher(server.url, None, named=True) as source,
    ):
        looks = [source.snapshot()]
        server.server.should_exit = True
        server.loop_thread.join()
        looks.append(source.snapshot())
    assert looks[0].server is not None
    assert looks[1].server is None
    assert server.url in looks[1].trouble
    assert looks[1].trouble
    assert log_line(looks, ()) != log_line(looks[:1], ())
    assert to_json(looks, "u", ())["rates"] is None


def test_a_server_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr("tests.server.harness.bind", lambda *_: bind("127.0.0.1", port))
    with Watcher(f"http://127.0.0.1:{port}", None, named=False) as source:
        assert str(port) in source.snapshot().trouble
        with running(ScriptedBackend()):
            found = source.snapshot().server
    assert found is not None
    assert found.model == "scripted"


# --- without a server --------------------------------------------------------------------------------------


def alone(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("VLFIT_PORT", "9")  # where nothing listens
    told = once(vlfit)
    assert told["server"] is None
    assert "http://127.0.0.1:9" in told["trouble"]
    return told


def test_a_desktop_alone(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DESKTOP)
    [gpu] = alone(vlfit, monkeypatch)["gpus"]
    assert (gpu["total"], gpu["free"], gpu["desktop"]) == (8151 * MIB, 7200 * MIB, 951 * MIB)
    held = {each["name"]: each["bytes"] for each in gpu["processes"]}
    assert held == {"Xorg": 310 * MIB, "firefox": 298 * MIB, "gnome-shell": 122 * MIB, "Discord": 96 * MIB}


def test_under_wsl2_sizes_of_programs_are_not_told(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WSL2)
    [gpu] = alone(vlfit, monkeypatch)["gpus"]
    assert [(each["name"], each["bytes"]) for each in gpu["processes"]] == [("Xwayland", None)]


def test_several_gpus(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DESKTOP, LARGE)
    gpus = alone(vlfit, monkeypatch)["gpus"]
    assert [(gpu["index"], gpu["free"] // MIB, len(gpu["processes"])) for gpu in gpus] == [
        (0, 7200, 4),
        (1, 24000, 0),
    ]


def test_no_gpu_and_no_server_is_said(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=18)
    told = alone(vlfit, monkeypatch)
    assert told["gpus"] == []
    assert "NVIDIA" in told["no_gpu"]


# --- beside a server on a GPU, made up ---------------------------------------------------------------------


def on_gpu(monkeypatch: pytest.MonkeyPatch, now: FakeCard, backend: OnGpu | None = None) -> Any:
    """A server that was started on ``CARD``, which is ``now`` so."""
    backend = backend or OnGpu()
    install(monkeypatch, CARD)
    settings = ServerSettings(expectation=expected_memory(backend, read_gpus({})[0]))
    install(monkeypatch, now)
    return running(backend, settings)


def with_us(mib: int, free: int) -> FakeCard:
    return replace(DESKTOP, free=free, compute=(Process(os.getpid(), "python", mib),))


def test_the_page_of_a_server_on_a_card(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_gpu(monkeypatch, with_us(700, free=6500)) as server:
        out = vlfit("top", "--once", "--interval", "0.3", "--url", server.url).out
    rows = rows_of(out)
    assert {"RAM,", "card,"} & rows.keys() == {"card,"}
    assert rows["desktop"][:3] == ["951", "951", "+0"]
    assert rows["vision_workspace"][1] == "-"
    assert rows["total"][1:] == ["1,651", "6,500", "MiB", "free", "of", "8,151", "MiB"]
    assert "python" not in rows["programs"]  # its own process is not among the others that the driver names


def test_a_desktop_that_eats_the_reserve_is_warned_about(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_gpu(monkeypatch, with_us(700, free=50)) as server:
        told = once(vlfit, "--url", server.url)
        out = vlfit("top", "--once", "--interval", "0.3", "--url", server.url).out
    assert [alarm["id"] for alarm in told["alarms"]] == ["crowded"]
    [alarm] = told["alarms"]
    assert "warning: " in out
    assert f"-> {alarm['hint']}" in out


def test_without_a_warning_the_same_server_is_quiet(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_gpu(monkeypatch, with_us(700, free=6500)) as server:
        assert once(vlfit, "--url", server.url)["alarms"] == []


def test_names_cannot_drive_the_terminal(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = OnGpu(model="\x1b[2Jevil")
    with on_gpu(monkeypatch, replace(CARD, name="card\x1b[31m"), evil) as server:
        out = vlfit("top", "--once", "--interval", "0.3", "--url", server.url).out
    assert "\x1b" not in out
    assert "\\x1b[2Jevil" in out


# --- what it tells ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(mini: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = httpx.get(f"{mini['url']}/v1/vlfit/status").json()
    return facts


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"version": None},
        {"pid": "x"},
        {"uptime_s": float("nan")},
        {"uptime_s": None},
        {"ledger": [{"line": "kv_cache"}]},
        {"ledger": 5},
        {"requests": {"running": 1}},
        {"requests": [1]},
        {"steps": {"decode_count": float("inf")}},
        {"memory": {"gpu": {"name": "x"}}},
        {"memory": 3},
        {"decode_step": {"slowest": {}}},
        {"kv_blocks": {"total": []}},
    ],
)
def test_a_status_that_is_broken(told: dict[str, Any], wrong: dict[str, Any]) -> None:
    read_status(told, "u", True)
    with pytest.raises(RemoteError):
        read_status({**told, **wrong}, "u", True)


# --- small things ------------------------------------------------------------------------------------------


def test_where_a_server_is_looked_for() -> None:
    assert local_server_url("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert local_server_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert local_server_url("::", 8000) == "http://[::1]:8000"


def test_the_curve_rises_and_is_flat_where_nothing_moves() -> None:
    assert _curve([100 * MIB, 200 * MIB, 900 * MIB], 8000 * MIB) == "▁▂█"
    assert _curve([100 * MIB, 100 * MIB + 5, 100 * MIB], 8000 * MIB) == "▁▁▁"
    assert len(_curve([0] * 500, 1)) == 40


def test_nothing_slow_is_loaded() -> None:
    program = (
        "import sys\n"
        "from vlfit.cli.main import main\n"
        "sys.argv = ['vlfit', 'top', '--once', '--json']\n"
        "try:\n    main()\n"
        "finally:\n"
        "    slow = ('torch', 'transformers', 'huggingface_hub', 'starlette', 'PIL', 'numpy', 'httpx')\n"
        "    print([name for name in slow if name in sys.modules], file=sys.stderr)\n"
    )
    environment = {**os.environ, "VLFIT_PORT": "9", "VLFIT_SERVER": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert json.loads(done.stdout)["version"] == 1
