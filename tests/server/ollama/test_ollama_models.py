"""The routes about models, ``keep_alive``, and the names that mean the served model."""

import json
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.damaged_gguf import rewritten
from tests.gguf_files import as_gguf
from tests.server.harness import Running, running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.stats import SleepResult, SleepState
from vlfit.backends.base import Capabilities
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.errors import InvalidRequest
from vlfit.server.models.served_models import ServedModel, is_plain_name
from vlfit.server.ollama.keep_alive import FOREVER, parse_keep_alive
from vlfit.server.ollama.model_details import details, loaded_row, short_name, with_tag
from vlfit.server.ollama.ollama_schema import (
    FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from vlfit.server.server_settings import OLLAMA_PORT, ServerSettings

ROOT = Path(__file__).parents[3]
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Sleeper(ScriptedBackend):
    """A scripted backend that sleeps."""

    capabilities = Capabilities(sleep=True)
    sleeps: list[float] = field(default_factory=list)
    wakes: int = 0
    is_asleep: bool = False

    @property
    def asleep(self) -> bool:
        return self.is_asleep

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        self.sleeps.append(time.monotonic())
        self.is_asleep = True
        done: Future[SleepResult] = Future()
        done.set_result(SleepResult(SleepState("ram", 1, 1, 0.0), True, 0.0))
        return done

    def wake(self) -> "Future[SleepResult]":
        self.wakes += 1
        self.is_asleep = False
        done: Future[SleepResult] = Future()
        done.set_result(SleepResult(None, True, 0.0))
        return done


def post(server: Running, route: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "stream": False, **fields}
    answer = httpx.post(f"{server.url}/api/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def loaded(server: Running) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = httpx.get(f"{server.url}/api/ps").json()["models"]
    return models


# --- keep_alive --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("0", 0.0),
        ("0s", 0.0),
        (-1, FOREVER),
        ("-1", FOREVER),
        ("-1m", FOREVER),
        (1e300, FOREVER),
        (90, 90.0),
        (0.5, 0.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        ("600", 600.0),
    ],
)
def test_durations(value: Any, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 m", "5x", "m", "--1", True, [5], {}, "1" * 200, "²"])
def test_wrong_durations(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_keep_alive(value)
    assert caught.value.param == "keep_alive"


def test_zero_sleeps_after_the_answer() -> None:
    backend = Sleeper()
    with running(backend) as server:
        assert post(server, "chat", messages=HELLO, keep_alive=0)["done_reason"] == "stop"
        wait_for(lambda: backend.is_asleep)
        assert loaded(server) == []
        assert httpx.get(f"{server.url}/api/tags").json()["models"] != []
        post(server, "chat", messages=HELLO, keep_alive=-1)
        assert backend.wakes == 1
        [row] = loaded(server)
        assert datetime.fromisoformat(row["expires_at"]) > datetime.now(UTC) + timedelta(days=36_500)
        assert len(backend.sleeps) == 1


def test_seconds_count_from_the_last_request() -> None:
    backend = Sleeper()
    with running(backend) as server:
        post(server, "generate", prompt="Hello", keep_alive="800ms")
        [row] = loaded(server)
        assert datetime.fromisoformat(row["expires_at"]) < datetime.now(UTC) + timedelta(seconds=1)
        time.sleep(0.5)
        # A request of another dialect counts, too.
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO}).raise_for_status()
        last = time.monotonic()
        wait_for(lambda: backend.is_asleep)
        assert backend.sleeps[0] - last > 0.7


def test_a_request_without_it_ends_the_count() -> None:
    backend = Sleeper()
    with running(backend) as server:
        post(server, "generate", prompt="Hello", keep_alive=0.3)
        post(server, "generate", prompt="Hello")
        time.sleep(0.6)
        assert not backend.sleeps


@pytest.mark.parametrize(("route", "empty"), [("generate", {}), ("chat", {"messages": []}), ("chat", {})])
def test_an_empty_prompt_loads_and_unloads(route: str, empty: dict[str, Any]) -> None:
    backend = Sleeper(is_asleep=True)
    with running(backend) as server:
        told = post(server, route, **empty)
        assert (told["done"], told["done_reason"]) == (True, "load")
        assert (told["message"]["content"] if route == "chat" else told["response"]) == ""
        assert not backend.is_asleep
        told = post(server, route, keep_alive=0, **empty)
        assert told["done_reason"] == "unload"
        assert backend.is_asleep
        assert post(server, route, keep_alive=0, **empty)["done_reason"] == "unload"
        assert not backend.started


def test_what_cannot_sleep_cannot_be_unloaded(server: Running, scripted: ScriptedBackend) -> None:
    assert post(server, "generate")["done_reason"] == "load"
    answer = httpx.post(f"{server.url}/api/generate", json={"model": "scripted", "keep_alive": 0})
    assert answer.status_code == 400


def test_mini_sleeps_and_wakes() -> None:
    options = EngineOptions(device="cpu", max_model_len=512)
    with NativeBackend.load("mini", options) as backend, running(backend) as server:
        post(server, "chat", model="mini", messages=HELLO, keep_alive=0, options={"num_predict": 3})
        wait_for(lambda: backend.asleep)
        told = post(server, "chat", model="mini", messages=HELLO, options={"num_predict": 3})
        assert told["eval_count"] == 3
        [row] = loaded(server)
        assert row["size"] > 20_000_000
        assert row["size_vram"] == 0
        assert row["context_length"] == 512
        [card] = httpx.get(f"{server.url}/api/tags").json()["models"]
        assert (card["name"], card["model"]) == ("mini:latest", "mini:latest")
        assert card["size"] == backend.checkpoint.weight_bytes
        assert re.fullmatch(r"[0-9a-f]{64}", card["digest"])
        assert card["details"]["family"] == "qwen3vl"
        assert card["details"]["quantization_level"] == "BF16"
        shown = post(server, "show", model="mini:latest")
        assert shown["capabilities"] == ["completion", "vision", "tools"]
        assert shown["model_info"]["qwen3vl.context_length"] == 512
        assert "<|im_start|>" in shown["template"]
        assert "temperature" in shown["parameters"]
        assert shown["details"] == card["details"]
        assert post(server, "show", model="", name="mini")["details"] == card["details"]


def test_bytes_on_the_card_are_those_that_are_held() -> None:
    row = {"name": "a", "model": "a", "digest": "", "details": {}, "size": 5}
    for facts, size, on_gpu in (
        ({"device": "cuda:0", "memory": {"held": 7, "gpu": {"total": 9}}}, 7, 7),
        ({"device": "cpu", "memory": {"held": 7, "gpu": None}}, 7, 0),
        ({"device": "http://other:8000"}, 5, 0),
    ):
        told = loaded_row(row, facts, expires_at="", context=None)
        assert (told["size"], told["size_vram"]) == (size, on_gpu)


def test_a_model_elsewhere_is_shown(server: Running) -> None:
    shown = post(server, "show")
    assert shown["capabilities"] == ["completion", "vision", "tools"]
    assert shown["template"] == ""
    [row] = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert (row["name"], row["size"]) == ("scripted:latest", 0)
    assert loaded(server)[0]["name"] == "scripted:latest"


# --- models ------------------------------------------------------------------------------------------------


def test_pulling_what_is_here(server: Running) -> None:
    assert post(server, "pull") == {"status": "success"}
    answer = httpx.post(f"{server.url}/api/pull", json={"model": "mini"})
    assert [json.loads(line)["status"] for line in answer.text.splitlines()][-1] == "success"


@pytest.mark.parametrize("name", ["qwen3-vl:8b", "nobody/nothing", "../../etc", "/etc", "x" * 300, "~"])
def test_pulling_what_is_not_here_names_the_command(server: Running, name: str) -> None:
    answer = httpx.post(f"{server.url}/api/pull", json={"model": name})
    assert answer.status_code == 404
    assert "vlfit pull" in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("DELETE", "delete", {"model": "scripted"}, 403),
        ("POST", "copy", {"source": "scripted", "destination": "other"}, 403),
        ("POST", "embed", {"model": "scripted", "input": "x"}, 400),  # this backend has no vectors
        ("POST", "embeddings", {"model": "scripted", "prompt": "x"}, 400),
    ],
)
def test_what_is_not_offered(
    server: Running, method: str, route: str, body: dict[str, Any], status: int
) -> None:
    answer = httpx.request(method, f"{server.url}/api/{route}", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("DELETE", "delete", {"model": "other"}),
        ("POST", "copy", {"source": "other", "destination": "x"}),
        ("POST", "show", {"model": "other"}),
        ("POST", "chat", {"model": "other", "messages": HELLO}),
    ],
)
def test_unknown_models(server: Running, method: str, route: str, body: dict[str, Any]) -> None:
    answer = httpx.request(method, f"{server.url}/api/{route}", json=body)
    assert answer.status_code == 404
    assert "scripted" in answer.json()["error"]


def test_a_model_must_be_named(server: Running) -> None:
    for route in ("show", "pull", "chat", "generate"):
        answer = httpx.post(f"{server.url}/api/{route}", json={})
        assert answer.status_code == 400
        assert "model" in answer.json()["error"]


def test_the_greeting_is_for_clients(server: Running) -> None:
    agent = {"user-agent": "ollama-python/0.6.1 (x86_64 linux) Python/3.12"}
    assert httpx.get(server.url, headers=agent).text == "Ollama is running"
    assert httpx.head(server.url).status_code == 200
    for headers in ({}, {"accept": "text/html,*/*"}):
        assert "<!doctype html>" in httpx.get(server.url, headers=headers).text
    port = {"host": f"127.0.0.1:{OLLAMA_PORT}"}
    assert httpx.get(server.url, headers=port).text == "Ollama is running"
    assert "<!doctype html>" in httpx.get(server.url, headers={**port, "accept": "text/html"}).text
    assert re.fullmatch(r"\d+\.\d+\.\d+", httpx.get(f"{server.url}/api/version").json()["version"])


@pytest.mark.parametrize(
    ("served", "names"),
    [
        ("mini", ["mini", "mini:latest", "MINI"]),
        (
            "Qwen/Qwen3-VL-4B-Instruct-FP8",
            ["qwen3-vl:4b", "qwen3-vl:4b-instruct", "qwen3-vl:4b-fp8", "4B", "4B-FP8", "typed"],
        ),
        ("Qwen3-VL-4B-Instruct-INT4", ["qwen3-vl:4b", "4B-int4", "Qwen3-VL-4B-Instruct-INT4:latest"]),
        ("Qwen/Qwen3-VL-2B-Thinking", ["qwen3-vl:2b-thinking", "qwen/qwen3-vl-2b-thinking"]),
        ("ollama:textonly:latest", ["textonly", "textonly:latest", "ollama:textonly"]),
    ],
)
def test_names_that_mean_the_served_model(served: str, names: list[str]) -> None:
    model = ServedModel(ScriptedBackend(model=served), ("typed",))
    assert [name for name in names if not model.is_called(name)] == []
    others = [
        "qwen3-vl:8b",
        "4B-BF16",
        "llama3",
        "2B",
        "/etc/passwd",
        "..",
        "~root",
        "x" * 300,
        "a\0b",
        ":latest",
    ]
    assert [name for name in others if model.is_called(name)] == []


def test_paths_are_no_names() -> None:
    assert is_plain_name("org/name")
    paths = ("/etc", "./x", "../x", "a/../b", "~", "c:/x", "a\\b", "", "a/b/c", "a\nb")
    assert not [name for name in paths if is_plain_name(name)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl:4b"),
        ("Qwen/Qwen3-VL-8B-Instruct-FP8", "qwen3-vl:8b"),
        ("Qwen/Qwen3-VL-2B-Thinking", "qwen3-vl:2b-thinking"),
        ("mini", ""),
        ("org/other", ""),
    ],
)
def test_names_as_ollama_has_them(name: str, short: str) -> None:
    assert short_name(name) == short
    assert with_tag("a:b") == "a:b"


def test_the_served_model_is_listed_under_both_names() -> None:
    backend = ScriptedBackend(model="Qwen/Qwen3-VL-4B-Instruct-FP8")
    with running(backend) as server:
        rows = httpx.get(f"{server.url}/api/tags").json()["models"]
        assert [row["name"] for row in rows] == ["qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct-FP8:latest"]
        assert rows[0]["digest"] == rows[1]["digest"]
        for row in rows:
            post(server, "chat", model=row["name"], messages=HELLO)
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"model": "qwen3-vl:4b", "messages": HELLO}
        )
        assert answer.json()["model"] == backend.model


def test_pulling_is_not_limited_to_the_served_model() -> None:
    with running(ScriptedBackend(), ServerSettings(aliases=("other",))) as server:
        assert post(server, "pull", model="other") == {"status": "success"}


# --- the table of fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("/api/chat", OllamaChatRequest),
        ("/api/generate", OllamaGenerateRequest),
        ("messages", OllamaMessage),
        ("options", Options),
    ],
)
def test_the_table_and_the_schema_agree(section: str, model: type[Any]) -> None:
    """Fields with an effect are in the schema; of those that are ignored only some, to check their type."""
    fields = set(model.model_fields)
    effective = {name for name, (effect, _) in FIELDS[section].items() if effect != "ignored"}
    assert effective <= fields
    assert fields - set(FIELDS[section]) <= {"tool_call_id"}


def test_the_table_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "ollama.md").read_text("utf-8")
    for section, fields in FIELDS.items():
        for name, (effect, note) in fields.items():
            assert f"| `{name}` | {effect} | {note} |" in page, (section, name)


def test_fields_of_the_table_do_as_it_says(server: Running, scripted: ScriptedBackend) -> None:
    """Whatever is documented is never refused as unknown, and listed if it is ignored."""
    ignored = {name for name, (effect, _) in FIELDS["options"].items() if effect == "ignored"}
    told = post(server, "chat", messages=HELLO, options=dict.fromkeys(ignored, 1))
    assert set(told["vlfit"]["ignored"]) == {f"options.{name}" for name in ignored}
    for name in ("typical_p", "tfs_z", "mirostat", "vocab_only", "embedding_only"):
        assert FIELDS["options"][name][0] == "refused"
        value: Any = True if name.endswith("only") else 2
        answer = httpx.post(
            f"{server.url}/api/chat",
            json={"model": "scripted", "messages": HELLO, "options": {name: value}},
        )
        assert answer.status_code == 400
        assert name in answer.json()["error"]


# --- GGUF models -------------------------------------------------------------------------------------------


def details_of(model: Path) -> dict[str, Any]:
    backend = ScriptedBackend()
    backend.checkpoint = open_checkpoint(model)
    return details(ServedModel(backend))


def test_a_gguf_is_shown_as_ollama_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, mmproj = as_gguf(mini_folder(), tmp_path / "gguf", "q5_0")
    assert mmproj is not None
    shown = details_of(model)
    assert (shown["format"], shown["quantization_level"]) == ("gguf", "Q5_0")
    assert (shown["family"], shown["families"]) == ("qwen3vl", ["qwen3vl", "clip"])
    text_only = rewritten(model, tmp_path / "alone" / "m-Q8_0.gguf", {"general.file_type": 15})
    shown = details_of(text_only)  # metadata go before the name and the tensors
    assert (shown["quantization_level"], shown["families"]) == ("Q4_K_M", ["qwen3vl"])
    untyped = rewritten(model, tmp_path / "untyped" / "m.gguf", {"general.file_type": None})
    assert details_of(untyped)["quantization_level"] == "Q5_0"
    kept = details_of(mini_folder())
    assert (kept["format"], kept["quantization_level"]) == ("safetensors", "BF16")
    assert kept["families"] == ["qwen3vl"]
