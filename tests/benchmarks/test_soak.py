"""The soak but for the GPU and the thousand: what is asked, what may come of it, and what is said of it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.asking import BROKE_OFF, HUNG_UP, Reply
from benchmarks.measure import MIB
from benchmarks.soak_memory import Moment, growth, table
from benchmarks.soak_requests import BROKEN, BURST, LARGE, LEFT, LOW, WHOLE, Wanted, requests
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
    assert set(counted) >= {WHOLE, LEFT, LOW, LARGE, BURST}
    assert "429 queue_full" in result["outcomes"][BURST]
    assert result["status"]["requests"]["cancelled"] > 0
    out = capsys.readouterr().out
    assert "hung up on" in out
    assert "of RAM from ready to the end" in out


def test_the_context_is_no_longer_than_the_checkpoint(tmp_path: Path) -> None:
    assert soak.usual_context(mini_folder()) == 4096
    config = json.loads((mini_folder() / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 262144
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert soak.usual_context(tmp_path) == 6144


def no_picture(width: int, height: int, seed: int) -> bytes:
    return b"%d x %d" % (width, height)


@pytest.fixture(scope="module")
def work() -> list[Wanted]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "benchmarks.soak_requests.jpeg", lambda width, height, seed: b"%d x %d" % (width, height)
        )
        return requests(1000, 6144, 1280, 36, 1)


def test_a_thousand_requests_of_all_kinds(work: list[Wanted]) -> None:
    assert sum(each.count for each in work) == 1000
    kinds = Counter(each.kind for each in work)
    alone = sum(kinds.values()) - kinds[BURST]
    assert kinds[BURST] == 4
    assert 0.28 < kinds[LEFT] / alone < 0.38
    assert min(kinds[LOW], kinds[LARGE], kinds[BROKEN]) > 15
    plain = [each for each in work if each.kind in (WHOLE, LEFT, LOW)]
    assert {len(each.pictures) for each in plain} == {1, 2, 3, 4}
    assert min(each.tokens for each in plain) == 1
    assert max(each.tokens for each in plain) > 550
    assert all(len(each.pictures) * 1282 + each.tokens < 6000 for each in plain)
    assert all((each.hang_up_after or 0) < each.tokens for each in plain)
    assert len({url for each in plain for url in each.pictures}) > 30
    assert all(each.count > 36 for each in work if each.kind == BURST)


def test_the_same_numbers_ask_the_same(work: list[Wanted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.soak_requests.jpeg", lambda width, height, seed: b"%d x %d" % (width, height)
    )
    assert requests(1000, 6144, 1280, 36, 1) == work
    assert requests(1000, 6144, 1280, 36, 2) != work


WHOLE_OF_7 = Wanted(WHOLE, "a", tokens=7)
LEFT_AFTER_3 = Wanted(LEFT, "a", tokens=7, hang_up_after=3)


@pytest.mark.parametrize(
    ("wanted", "reply", "fits"),
    [
        (WHOLE_OF_7, Reply(200, "length", tokens=7), True),
        (WHOLE_OF_7, Reply(200, "length", tokens=6), False),
        (WHOLE_OF_7, Reply(200, "stop", tokens=7), False),
        (WHOLE_OF_7, Reply(503, "out_of_memory"), False),
        (WHOLE_OF_7, Reply(0, BROKE_OFF), False),
        (WHOLE_OF_7, Reply(400, "context_length_exceeded"), False),
        (WHOLE_OF_7, Reply(429, "queue_full", retry_after="3"), True),
        (WHOLE_OF_7, Reply(429, "queue_full"), False),
        (LEFT_AFTER_3, Reply(200, HUNG_UP, tokens=3), True),
        (LEFT_AFTER_3, Reply(200, HUNG_UP, tokens=2), False),
        (LEFT_AFTER_3, Reply(200, BROKE_OFF, tokens=1), False),
        (Wanted(LARGE, "a"), Reply(400, "context_length_exceeded"), True),
        (Wanted(LARGE, "a"), Reply(200, "length", tokens=1), False),
        (Wanted(BROKEN, "a"), Reply(400, "invalid_image"), True),
        (Wanted(BROKEN, "a"), Reply(500, "internal_error"), False),
    ],
)
def test_what_may_come_of_a_request(wanted: Wanted, reply: Reply, fits: bool) -> None:
    assert wanted.fits(reply) is fits


def a_run(**changes: Any) -> tuple[Any, soak.Soak, Any]:
    """A server as it is seen after two requests, one counted as settled."""
    seen: dict[str, Any] = {
        "card": 5700 * MIB,
        "resident": 1000 * MIB,
        "settled_resident": 980 * MIB,
        "most": 5700 * MIB,
        "failed": 0,
        "used": 3,
        "replies": [Reply(200, "length", tokens=7)] * 2,
    } | changes
    status = {
        "requests": {"failed": seen["failed"], "running": 0, "waiting": 0},
        "places": {"taken": 0},
        "kv_blocks": {"used": seen["used"], "known": 3},
        "tokens": {},
        "steps": {},
    }
    watched = SimpleNamespace(
        since=lambda _: (5700 * MIB, seen["most"]), peak=seen["most"], peak_resident=seen["resident"]
    )
    served = SimpleNamespace(
        watched=watched,
        ask=lambda path: status,
        seconds=10.0,
        ready_s=1.0,
    )
    found = soak.Soak(2)
    found.replies = [(WHOLE_OF_7, reply) for reply in seen["replies"]]
    found.moments = [
        Moment(soak.READY, 0, 1.0, 5700 * MIB, 900 * MIB, 500 * MIB, 0),
        Moment(soak.SETTLED, 1, 2.0, 5700 * MIB, seen["settled_resident"], 550 * MIB, 10 * MIB),
        Moment(soak.END, 2, 9.0, seen["card"], seen["resident"], 560 * MIB, 15 * MIB),
    ]
    return served, found, SimpleNamespace(device="cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"card": 5702 * MIB}, ["memory moved"]),
        ({"most": 5701 * MIB}, ["memory moved between 5700.0 and 5701.0"]),
        ({"settled_resident": 940 * MIB}, ["RAM grew by 60 MiB"]),
        ({"failed": 2}, ["2 requests failed inside"]),
        ({"used": 5}, ["2 KV blocks are held by nobody"]),
        ({"replies": [Reply(200, "length", tokens=7)]}, ["1 of 2 requests"]),
        ({"replies": [Reply(200, "length", tokens=7), Reply(503, "out_of_memory")]}, ["503 out_of_memory"]),
    ],
)
def test_what_must_not_be(changes: dict[str, Any], words: list[str]) -> None:
    served, found, options = a_run(**changes)
    said = soak.told(served, found, options)["verdicts"]
    assert len(said) == len(words)
    for expected, words_said in zip(words, said, strict=True):
        assert expected in words_said


def test_who_finds_the_queue_full_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Reply(429, "queue_full", retry_after="3")
    replies = iter([full, full, Reply(200, "length", tokens=5)])
    monkeypatch.setattr(soak, "ask", lambda *_: next(replies))
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    reply = soak.patiently(SimpleNamespace(), "", Wanted(WHOLE, "a", tokens=5))  # type: ignore[arg-type]
    assert (reply.tokens, waited) == (5, [1, 1])
    replies = iter([full] * soak.MOST_TRIES)
    assert soak.patiently(SimpleNamespace(), "", Wanted(WHOLE, "a", tokens=5)) == full  # type: ignore[arg-type]


def test_growth_is_told_by_whose_it_is() -> None:
    _, found, _ = a_run()
    ready, settled, end = found.moments
    assert growth(settled, end) == (
        "+20.0 MiB of RAM from settled to the end: +5.0 kept features, +5.0 anonymous beside them, "
        "+10.0 of files"
    )
    assert "+100.0 MiB of RAM from ready" in growth(ready, end)
    assert table(found.moments)[2] == ["1 settled", "2", "5,700.0", "980.0", "550.0", "430.0", "10.0"]


def test_a_run_that_was_too_short_says_that_nothing_is_known_of_memory() -> None:
    served, found, options = a_run()
    del found.moments[1]
    assert soak.told(served, found, options)["verdicts"] == [
        "too few requests were made: nothing is known of memory"
    ]
