"""Several real models by name over HTTP: the right one answers, memory stays as planned, nobody is lost."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, wait_for
from tests.server.models.several import OPTIONS, QUESTION, Several, answer_of, ask, serving, several
from tests.tiny_pooled import make_embedding_model, make_reranker
from vlfit.api.conversation import single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend

CLIENTS = 6
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    from tests.tiny import build_tiny

    base = tmp_path_factory.mktemp("several")
    names = {"tied": "tiny-one", "untied_sharded": "tiny-two"}
    return ["mini", *(build_tiny(spec, base / name) for spec, name in names.items())]


@pytest.fixture(scope="module")
def answers(folders: list[str | Path]) -> dict[str, str]:
    """What each model says by itself."""
    found = {}
    for folder in folders:
        with NativeBackend.load(folder, OPTIONS) as backend:
            sampling = SamplingParams(temperature=0.0, max_tokens=8)
            found[backend.model] = backend.stream(single_turn(QUESTION), sampling).answer().text
    assert len(set(found.values())) == len(folders), "answers that would tell models apart"
    return found


@pytest.fixture(scope="module")
def silent(folders: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of mini, an embedding model and a reranker."""
    base = tmp_path_factory.mktemp("silent")
    source = Path(folders[1])
    made = [make_embedding_model(source, base / "vectors"), make_reranker(source, base / "scores")]
    with serving(several(["mini", *made])) as running_server:
        yield running_server


@pytest.fixture
def made(folders: list[str | Path]) -> Several:
    return several(folders)


@pytest.fixture
def server(made: Several) -> Iterator[Running]:
    with serving(made) as running_server:
        yield running_server


def states(server: Running) -> dict[str, str]:
    time.sleep(0.25)  # the status is cached for a moment
    rows = httpx.get(f"{server.url}/v1/vlfit/status").json()["models"]
    return {row["model"]: row["state"] for row in rows}


def test_the_model_of_a_request_answers(server: Running, made: Several, answers: dict[str, str]) -> None:
    assert set(states(server).values()) == {"unloaded"}
    for name in [*answers, *answers]:
        assert answer_of(ask(server, name)) == answers[name]
        assert Counter(states(server).values())["ready"] == 1
    assert answer_of(ask(server, "")) == answers["mini"]  # the first is the default
    assert set(states(server).values()) == {"ready", "sleeping"}
    assert made.models.line.num_changes >= 2 * len(answers)


def test_what_fits_stays_in_memory(folders: list[str | Path], answers: dict[str, str]) -> None:
    made = several(folders, at_once=3)
    with serving(made) as server:
        for name in [*answers, *answers]:
            assert answer_of(ask(server, name)) == answers[name]
        assert set(states(server).values()) == {"ready"}
        assert made.models.line.num_changes == 3


def test_every_list_shows_all_models(server: Running, answers: dict[str, str]) -> None:
    answer_of(ask(server, "tiny-one"))
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == list(answers)
    assert {card["id"]: card["vlfit"]["state"] for card in cards}["tiny-one"] == "ready"
    assert all(card["max_model_len"] == 256 for card in cards)
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {row["name"].partition(":")[0] for row in tags} >= set(answers)
    loaded = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert [row["name"].partition(":")[0] for row in loaded] == ["tiny-one"]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vlfit_model_state{model="tiny-one",state="ready"} 1' in metrics
    assert 'vlfit_model_state{model="mini",state="ready"} 0' in metrics
    ledger = httpx.get(f"{server.url}/v1/vlfit/ledger").json()["models"]
    assert {row["model"] for row in ledger if row["held"]} == {"tiny-one"}
    facts = httpx.get(f"{server.url}/page/facts.json").json()
    assert facts["models"] == list(answers)


def test_top_shows_all_models(server: Running, answers: dict[str, str]) -> None:
    answer_of(ask(server, "tiny-two"))
    command = [sys.executable, "-m", "vlfit", "top", "--once", "--interval", "0.3", "--url", server.url]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = {line.split()[0]: line.split()[1] for line in page.splitlines() if line.startswith(tuple(answers))}
    assert rows == {"mini": "unloaded", "tiny-one": "unloaded", "tiny-two": "ready"}


def test_unknown_names_get_those_that_are_there(server: Running) -> None:
    reply = ask(server, "nobody")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny-two" in reply.json()["error"]["message"]
    ollama = httpx.post(f"{server.url}/api/chat", json={"model": "nobody", "messages": []})
    assert ollama.status_code == 404


def test_counters_of_all_models_add_up(server: Running, answers: dict[str, str]) -> None:
    generated = 0
    for number, name in enumerate([*answers, *answers], 1):
        generated += ask(server, name).json()["usage"]["completion_tokens"]
        time.sleep(0.25)
        status = httpx.get(f"{server.url}/v1/vlfit/status").json()
        assert (status["requests"]["finished"], status["tokens"]["generated"]) == (number, generated)


def test_sleep_and_wake_by_name(server: Running) -> None:
    answer_of(ask(server, "tiny-one"))
    slept = httpx.post(f"{server.url}/v1/vlfit/sleep", json={"model": "tiny-one"}).json()
    assert (slept["state"], slept["changed"]) == ("asleep", True)
    assert httpx.get(f"{server.url}/v1/vlfit/status").json()["state"] == "asleep"
    woken = httpx.post(f"{server.url}/v1/vlfit/wake", json={"model": "tiny-two"}, timeout=60).json()
    assert woken["state"] == "ready"
    assert states(server)["tiny-two"] == "ready"
    assert httpx.post(f"{server.url}/v1/vlfit/sleep", json={}).json()["changed"]
    assert "ready" not in states(server).values()
    refused = httpx.post(f"{server.url}/v1/vlfit/wake", json={"model": "nobody"})
    assert refused.status_code == 404


def test_keep_alive_of_one_model_leaves_the_others(folders: list[str | Path]) -> None:
    with serving(several(folders, at_once=3)) as server:
        for name, keep_alive in (("tiny-one", 0), ("tiny-two", -1)):
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "keep_alive": keep_alive}
            told = httpx.post(f"{server.url}/api/chat", json={**body, "stream": False}, timeout=60)
            assert told.status_code == 200
        wait_for(lambda: states(server)["tiny-one"] == "sleeping")
        assert states(server)["tiny-two"] == "ready"


def test_tokens_of_a_model_that_was_never_loaded_are_counted(server: Running) -> None:
    body = {"model": "tiny-two", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    assert httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0
    price = httpx.post(f"{server.url}/v1/vlfit/price", json=body | {"model": "tiny-one"}).json()
    assert price["model"] == "tiny-one"


def test_tokens_are_counted_without_a_change(server: Running, made: Several) -> None:
    for name in ("tiny-one", "tiny-two"):
        answer_of(ask(server, name))
    changes = made.models.line.num_changes
    body = {"model": "tiny-one", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] > 0
    assert made.models.line.num_changes == changes


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/generate", {"prompt": "Hi", "raw": True}),
    ],
)
def test_a_question_to_a_model_that_writes_no_text_loads_nothing(
    silent: Running, route: str, fields: dict[str, Any]
) -> None:
    for name in ("vectors", "scores"):
        refused = httpx.post(f"{silent.url}{route}", json={"model": name, **fields}, timeout=60)
        assert refused.status_code == 400, refused.text
        assert name in refused.text
    assert states(silent) == {"mini": "unloaded", "vectors": "unloaded", "scores": "unloaded"}


def test_without_a_name_the_first_model_for_the_task_answers(silent: Running) -> None:
    for route, fields, model in (
        ("/v1/embeddings", {"input": "Hi"}, "vectors"),
        ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}, "scores"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}, "mini"),
    ):
        reply = httpx.post(f"{silent.url}{route}", json=fields, timeout=60)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model


def test_a_model_that_cannot_be_loaded_is_an_error_and_the_old_one_comes_back(
    server: Running, made: Several, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlfit.errors import MissingFile

    answer_of(ask(server, "mini"))
    broken = made.models.backends[1]

    def fail() -> None:
        raise MissingFile("model.safetensors is gone", "Get it back.")

    monkeypatch.setattr(broken, "_load", fail)
    reply = ask(server, broken.model)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "checkpoint_error")
    wait_for(lambda: made.models.in_memory != [])
    assert [each.model for each in made.models.in_memory] == ["mini"]
    assert answer_of(ask(server, "mini")) == answers["mini"]
    assert answer_of(ask(server, "tiny-two")) == answers["tiny-two"]


@pytest.mark.parametrize(
    "changes", [pytest.param(25, id="25"), pytest.param(200, id="200", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(600)
def test_random_changes_under_load(folders: list[str | Path], answers: dict[str, str], changes: int) -> None:
    made = several(folders, min_stay=0.02, idle_grace=0.005)
    number, peak, over = 0, 0, threading.Event()
    with serving(made) as server, ThreadPoolExecutor(CLIENTS) as clients:

        def watch() -> None:
            nonlocal number, peak
            while not over.wait(0.002):
                number, peak = map(max, zip((number, peak), made.held(), strict=True))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            results = list(
                clients.map(lambda seed: client(server, answers, made, changes, seed), range(CLIENTS))
            )
        finally:
            over.set()
            watcher.join()
        wait_for(lambda: all(not made.models.line.in_use(name) for name in answers))
    asked = Counter[str]()
    for result in results:
        asked.update(result)
    assert asked["wrong"] == asked["failed"] == 0
    assert asked["right"] >= changes / 2
    assert made.models.line.num_changes >= changes
    assert number == 1, "two models in memory where one fits"
    assert 0 < peak <= made.limit


def client(
    server: Running, answers: dict[str, str], made: Several, changes: int, seed: int
) -> dict[str, int]:
    """Ask models at random in three dialects, now and then hang up, until there were enough changes."""
    rng, told = random.Random(seed), Counter[str]()
    kinds: tuple[Callable[[httpx.Client, str], str], ...] = (by_openai, by_ollama, by_anthropic)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        while made.models.line.num_changes < changes:
            name = rng.choice(list(answers))
            if rng.random() < 0.1:
                hang_up(http, name)
                continue
            try:
                text = rng.choice(kinds)(http, name)
            except (AssertionError, httpx.HTTPError, KeyError):
                told["failed"] += 1
            else:
                told["right" if text == answers[name] else "wrong"] += 1
    return dict(told)


MESSAGES = [{"role": "user", "content": QUESTION}]


def by_openai(http: httpx.Client, name: str) -> str:
    body = {"model": name, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "stream": True}
    text, model = "", ""
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                model = event["model"]
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    assert model == name
    return text


def by_ollama(http: httpx.Client, name: str) -> str:
    options = {"temperature": 0, "num_predict": 8}
    body = {"model": name, "messages": MESSAGES, "options": options, "stream": False, "keep_alive": "5m"}
    told = http.post("/api/chat", json=body)
    assert told.status_code == 200
    text: str = told.json()["message"]["content"]
    return text


def by_anthropic(http: httpx.Client, name: str) -> str:
    body: dict[str, Any] = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    told = http.post("/v1/messages", json=body)
    assert told.status_code == 200
    assert told.json()["model"] == name
    return "".join(part["text"] for part in told.json()["content"])


def hang_up(http: httpx.Client, name: str) -> None:
    """Leave in line, or while the answer is made."""
    body = {"model": name, "messages": MESSAGES, "max_tokens": 60, "ignore_eos": True}
    with suppress(httpx.TimeoutException):
        http.post("/v1/chat/completions", json=body, timeout=0.05)


def test_stopping_during_a_change_waits_for_nobody_and_keeps_nothing(folders: list[str | Path]) -> None:
    made = several(folders)
    slow = made.models.backends[1]
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    load = slow._load

    def slowly() -> None:
        begun.set()
        assert go_on.wait(60)
        try:
            load()
        finally:
            ended.set()

    slow._load = slowly  # type: ignore[method-assign]
    with serving(made) as server:
        answer_of(ask(server, "mini"))
        threading.Thread(target=lambda: leave_alone(server, slow.model), daemon=True).start()
        assert begun.wait(60)
    go_on.set()
    assert ended.wait(60)
    assert slow.state == "unloaded"


def leave_alone(server: Running, name: str) -> None:
    with suppress(httpx.HTTPError):
        ask(server, name)
