"""The soak without a GPU: its requests, their right outcomes, and its verdicts."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.harness import MIB
from benchmarks.serving import BROKEN_OFF, DISCONNECTED, Reply
from benchmarks.soak import MemorySample, growth, memory_table
from benchmarks.soak_requests import (
    BROKEN,
    BURST,
    DISCONNECT,
    LOW,
    TOO_LARGE,
    WHOLE,
    SoakRequest,
    requests,
)
from vlfit.checkpoint.source import mini_folder


@pytest.mark.slow
def test_a_small_soak_of_a_real_server(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny: Callable[[str], Path],
) -> None:
    file = tmp_path / "soak.json"
    given = (
        *("--model", tiny("tied"), "--device", "cpu", "--requests", 44, "--settled", 22, "--seed", 33),
        *("--context", 512, "--serve", "--kv 1024", "--sequences", 2, "--image-tokens", 64, "--json", file),
    )
    monkeypatch.setattr("sys.argv", ["soak", *map(str, given)])
    monkeypatch.setattr("benchmarks.soak_requests.LARGEST", 700)
    monkeypatch.setattr("benchmarks.soak_requests.POOL", 12)
    # Long enough that the last of a burst arrive before the first are answered, on a busy machine too.
    monkeypatch.setattr("benchmarks.soak_requests.BURST_TOKENS", 40)
    with pytest.raises(SystemExit) as ended:
        soak.main()
    result = json.loads(file.read_text())
    assert result["verdicts"] == []
    moments = {each["name"]: each for each in result["memory"]["moments"]}
    assert moments[soak.READY]["requests"] == 0
    assert 22 <= moments[soak.SETTLED]["requests"] < moments[soak.END]["requests"] == 44
    assert (
        0 < moments[soak.END]["image_cache"] < moments[soak.END]["anonymous"] < moments[soak.END]["resident"]
    )
    assert ended.value.code == 0
    counted = {kind: sum(counts.values()) for kind, counts in result["outcomes"].items()}
    assert sum(counted.values()) == 44
    assert set(counted) >= {WHOLE, DISCONNECT, LOW, TOO_LARGE, BURST}
    assert "429 queue_full" in result["outcomes"][BURST]
    assert result["status"]["requests"]["cancelled"] > 0
    assert capsys.readouterr().out


def test_the_context_is_no_longer_than_the_checkpoint(tmp_path: Path) -> None:
    assert soak.default_context(mini_folder()) == 4096
    config = json.loads((mini_folder() / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 262144
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert soak.default_context(tmp_path) == 6144


def no_picture(width: int, height: int, seed: int) -> bytes:
    return b"%d x %d" % (width, height)


@pytest.fixture(scope="module")
def drawn() -> list[SoakRequest]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "benchmarks.soak_requests.random_jpeg", lambda width, height, seed: b"%d x %d" % (width, height)
        )
        return requests(1000, 6144, 1280, 36, 1)


def test_a_thousand_requests_of_all_kinds(drawn: list[SoakRequest]) -> None:
    assert sum(each.count for each in drawn) == 1000
    kinds = Counter(each.kind for each in drawn)
    alone = sum(kinds.values()) - kinds[BURST]
    assert kinds[BURST] == 4
    assert 0.28 < kinds[DISCONNECT] / alone < 0.38
    assert min(kinds[LOW], kinds[TOO_LARGE], kinds[BROKEN]) > 15
    plain = [each for each in drawn if each.kind in (WHOLE, DISCONNECT, LOW)]
    assert {len(each.pictures) for each in plain} == {1, 2, 3, 4}
    assert min(each.tokens for each in plain) == 1
    assert max(each.tokens for each in plain) > 550
    assert all(len(each.pictures) * 1282 + each.tokens < 6000 for each in plain)
    assert all((each.disconnect_after or 0) < each.tokens for each in plain)
    assert len({url for each in plain for url in each.pictures}) > 30
    assert all(each.count > 36 for each in drawn if each.kind == BURST)


def test_the_same_numbers_ask_the_same(drawn: list[SoakRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.soak_requests.random_jpeg", lambda width, height, seed: b"%d x %d" % (width, height)
    )
    assert requests(1000, 6144, 1280, 36, 1) == drawn
    assert requests(1000, 6144, 1280, 36, 2) != drawn


WHOLE_OF_7 = SoakRequest(WHOLE, "a", tokens=7)
DISCONNECT_AFTER_3 = SoakRequest(DISCONNECT, "a", tokens=7, disconnect_after=3)


@pytest.mark.parametrize(
    ("sent", "reply", "accepted"),
    [
        (WHOLE_OF_7, Reply(200, "length", tokens=7), True),
        (WHOLE_OF_7, Reply(200, "length", tokens=6), False),
        (WHOLE_OF_7, Reply(200, "stop", tokens=7), False),
        (WHOLE_OF_7, Reply(503, "out_of_memory"), False),
        (WHOLE_OF_7, Reply(0, BROKEN_OFF), False),
        (WHOLE_OF_7, Reply(400, "context_length_exceeded"), False),
        (WHOLE_OF_7, Reply(429, "queue_full", retry_after="3"), True),
        (WHOLE_OF_7, Reply(429, "queue_full"), False),
        (DISCONNECT_AFTER_3, Reply(200, DISCONNECTED, tokens=3), True),
        (DISCONNECT_AFTER_3, Reply(200, DISCONNECTED, tokens=2), False),
        (DISCONNECT_AFTER_3, Reply(200, BROKEN_OFF, tokens=1), False),
        (SoakRequest(TOO_LARGE, "a"), Reply(400, "context_length_exceeded"), True),
        (SoakRequest(TOO_LARGE, "a"), Reply(200, "length", tokens=1), False),
        (SoakRequest(BROKEN, "a"), Reply(400, "invalid_image"), True),
        (SoakRequest(BROKEN, "a"), Reply(500, "internal_error"), False),
    ],
)
def test_right_outcomes_of_a_request(sent: SoakRequest, reply: Reply, accepted: bool) -> None:
    assert sent.accepts(reply) is accepted


def finished_run(**changes: Any) -> tuple[Any, soak.SoakRun, Any]:
    """Server, run and options after two requests, the first of which counts as settling."""
    state: dict[str, Any] = {
        "card": 5700 * MIB,
        "resident": 1000 * MIB,
        "settled_resident": 980 * MIB,
        "most": 5700 * MIB,
        "failed": 0,
        "used": 3,
        "replies": [Reply(200, "length", tokens=7)] * 2,
    } | changes
    status = {
        "requests": {"failed": state["failed"], "running": 0, "waiting": 0},
        "places": {"taken": 0},
        "kv_blocks": {"used": state["used"], "known": 3},
        "tokens": {},
        "steps": {},
    }
    memory = SimpleNamespace(
        range_since=lambda _: (5700 * MIB, state["most"]),
        curve=[],
        peak=state["most"],
        peak_resident=state["resident"],
    )
    server = SimpleNamespace(
        memory=memory,
        get=lambda path: status,
        seconds=10.0,
        ready_s=1.0,
    )
    run = soak.SoakRun(2)
    run.replies = [(WHOLE_OF_7, reply) for reply in state["replies"]]
    run.moments = [
        MemorySample(soak.READY, 0, 1.0, 5700 * MIB, 900 * MIB, 500 * MIB, 0, 5100 * MIB),
        MemorySample(
            soak.SETTLED, 1, 2.0, 5700 * MIB, state["settled_resident"], 550 * MIB, 10 * MIB, 5100 * MIB
        ),
        MemorySample(soak.END, 2, 9.0, state["card"], state["resident"], 560 * MIB, 15 * MIB, 5100 * MIB),
    ]
    return server, run, SimpleNamespace(device="cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"card": 5702 * MIB}, ["5700.0"]),
        ({"most": 5701 * MIB}, ["5701.0"]),
        ({"settled_resident": 940 * MIB}, ["60 MiB"]),
        ({"failed": 2}, ["2"]),
        ({"used": 5}, ["2"]),
        ({"replies": [Reply(200, "length", tokens=7)]}, ["1 of 2"]),
        ({"replies": [Reply(200, "length", tokens=7), Reply(503, "out_of_memory")]}, ["503 out_of_memory"]),
    ],
)
def test_verdicts(changes: dict[str, Any], words: list[str]) -> None:
    server, run, options = finished_run(**changes)
    verdicts = soak.summary(server, run, options)["verdicts"]
    assert len(verdicts) == len(words)
    for expected, verdict in zip(words, verdicts, strict=True):
        assert expected in verdict


def test_who_finds_the_queue_full_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Reply(429, "queue_full", retry_after="3")
    replies = iter([full, full, Reply(200, "length", tokens=5)])
    monkeypatch.setattr(soak, "send", lambda *_: next(replies))
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    reply = soak.send_with_retries(SimpleNamespace(), "", SoakRequest(WHOLE, "a", tokens=5))  # type: ignore[arg-type]
    assert (reply.tokens, waited) == (5, [1, 1])
    replies = iter([full] * soak.MAX_TRIES)
    assert soak.send_with_retries(SimpleNamespace(), "", SoakRequest(WHOLE, "a", tokens=5)) == full  # type: ignore[arg-type]


def test_growth_by_kind_of_memory() -> None:
    _, run, _ = finished_run()
    ready, settled, end = run.moments
    assert re.findall(r"[+-][\d.]+", growth(settled, end)) == ["+20.0", "+5.0", "+5.0", "+10.0"]
    assert re.findall(r"[+-][\d.]+", growth(ready, end))[0] == "+100.0"
    assert memory_table(run.moments)[2] == [
        "1 settled",
        "2",
        "5,700.0",
        "5,100.0",
        "980.0",
        "550.0",
        "430.0",
        "10.0",
    ]


def test_a_run_that_was_too_short_says_that_nothing_is_known_of_memory() -> None:
    server, run, options = finished_run()
    del run.moments[1]
    [verdict] = soak.summary(server, run, options)["verdicts"]
    assert "memory" in verdict
