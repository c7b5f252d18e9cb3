"""``vlfit sleep`` and ``vlfit wake`` beside a real server, beside none, and what ``vlfit top`` shows then."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.machine.nvml import install
from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit import client
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.errors import CannotWake, InvalidRequest, UsageError
from vlfit.plan.alarms import Limits
from vlfit.server.server_settings import ServerSettings


@pytest.fixture
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), EngineOptions(device="cpu", max_model_len=512)) as loaded:
        yield loaded


@pytest.fixture
def server(backend: NativeBackend) -> Iterator[Running]:
    with running(backend) as serving:
        yield serving


def test_asleep_and_awake(vlfit: Vlfit, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_PORT", str(server.port))  # found as `vlfit top` finds it
    ended = vlfit("sleep", "--json")
    assert (ended.code, ended.err) == (0, "")
    first, again = json.loads(ended.out), json.loads(vlfit("sleep", "--json").out)
    assert (first["state"], first["changed"], first["sleep"]["park"]) == ("asleep", True, "files")
    assert (again["state"], again["changed"], again["sleep"]["park"]) == ("asleep", False, "files")
    woken = json.loads(vlfit("wake", "--json").out)
    assert (woken["state"], woken["changed"]) == ("ready", True)
    woken = json.loads(vlfit("wake", "--url", server.url, "--json").out)
    assert (woken["state"], woken["changed"]) == ("ready", False)


def test_what_top_shows(vlfit: Vlfit, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=12)
    vlfit("sleep", "--url", server.url)
    shown = vlfit("top", "--once", "--interval", "0.3", "--url", server.url).out
    assert ", asleep" in shown.splitlines()[0]
    assert "warning" not in shown
    weights = next(row.split() for row in shown.splitlines() if row.startswith("weights.text"))
    assert len(weights) == 3, "a sleeper differs from the plan, as it should: that is not told"
    facts = json.loads(vlfit("top", "--once", "--json", "--interval", "0.3", "--url", server.url).out)
    assert facts["server"]["state"] == "asleep"
    vlfit("wake", "--url", server.url)
    assert "asleep" not in vlfit("top", "--once", "--interval", "0.3", "--url", server.url).out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_top_fits_its_terminal(
    width: int, vlfit: Vlfit, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, failure=12)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = vlfit("top", "--once", "--interval", "0.1", "--url", server.url).out
    rows = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert max(map(len, rows)) <= width
    (heads,) = [row.split() for row in rows if "planned" in row and "held" in row]
    (total,) = [row.split() for row in rows if row.startswith("total")]
    assert heads[-3:] == ["planned", "held", "difference"]
    assert "…" not in total[1] + total[2]


def test_who_takes_the_memory_of_a_sleeper_is_no_alarm(server: Running, vlfit: Vlfit) -> None:
    from vlfit.cli.watcher import Watcher

    with Watcher(server.url, None, named=True) as source:
        vlfit("sleep", "--url", server.url)
        look = source.snapshot()
        assert look.server is not None
        assert look.server.sleep is not None
        assert look.server.limits == Limits()


def test_refusals(
    vlfit: Vlfit, server: Running, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = vlfit("sleep", "--park", "ram", "--url", server.url)
    assert ended.code == 2
    assert "CPU" in ended.err
    assert vlfit("sleep", "--park", "disk").code == 2
    vlfit("sleep", "--url", server.url)
    monkeypatch.setattr(backend._engine_thread.engine.executor.budget, "available_bytes", lambda: 0)
    ended = vlfit("wake", "--url", server.url)
    assert (ended.code, ended.out) == (1, "")
    assert "0 B" in ended.err
    assert backend.asleep


def test_the_key(vlfit: Vlfit, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(backend, ServerSettings(api_keys=("sesame",))) as server:
        assert "VLFIT_API_KEY" in vlfit("sleep", "--url", server.url).err
        monkeypatch.setenv("VLFIT_API_KEY", "sesame")
        assert vlfit("sleep", "--url", server.url).code == 0


@pytest.mark.parametrize("command", ["sleep", "wake"])
def test_nothing_running_is_an_answer(command: str, vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_PORT", "9")
    ended = vlfit(command)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == vlfit("stop").out
    assert vlfit(command, "--json").out == ""
    assert vlfit(command, "--url", "http://127.0.0.1:9").code == 1


def test_no_server_and_others(vlfit: Vlfit) -> None:
    ended = vlfit("sleep", "--url", "http://127.0.0.1:9")
    assert ended.code == 1
    assert "vlfit serve" in ended.err
    with running(ScriptedBackend()) as server:
        assert vlfit("wake", "--url", server.url).code == 2
        assert "--url" in vlfit("wake", "--url", f"{server.url}/other").err


def test_from_python(server: Running, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.Client(server.url) as model:
        words = model.ask("hello", max_tokens=8).text
        model.sleep()
        assert backend.asleep
        model.wake()
        assert not backend.asleep
        model.sleep()
        assert model.ask("hello", max_tokens=8).text == words
        model.sleep()
        monkeypatch.setattr(backend._engine_thread.engine.executor.budget, "available_bytes", lambda: 0)
        with pytest.raises(CannotWake, match=r"\b0 B\b"):
            model.wake()


def test_from_python_it_is_said_where_weights_wait(server: Running, backend: NativeBackend) -> None:
    with client.Client(server.url) as model:
        model.sleep("files")
        assert backend.asleep
        model.wake()
        with pytest.raises(InvalidRequest, match="CPU"):
            model.sleep("ram")
        assert not backend.asleep


def test_in_python(tiny: Callable[[str], Path]) -> None:
    with client.VLM(tiny("tied"), device="cpu", context=512) as model:
        words = model.ask("hello", max_tokens=8).text
        with pytest.raises(UsageError, match="CPU"):
            model.sleep("ram")
        model.sleep("files")
        model.sleep()
        assert model.ask("hello", max_tokens=8).text == words
        model.sleep()
        model.wake()
        assert model.ask("hello", max_tokens=8).text == words
