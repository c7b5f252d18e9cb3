"""``/metrics`` in Prometheus format, and JSON log lines."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Timings
from vlfit.backends.native import NativeBackend
from vlfit.server.admin.metrics import RequestMetrics, family_lines
from vlfit.server.http.log import JSONFormatter
from vlfit.server.server_settings import ServerSettings

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "ignore_eos": True}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """As Prometheus' own reader has them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def test_metrics_of_a_scrape(tiny: Callable[[str], Path]) -> None:
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=2)
    with NativeBackend.load(tiny("tied"), options) as backend:
        with running(backend, ServerSettings(context=256)) as server:
            assert httpx.post(f"{server.url}/v1/chat/completions", json=HELLO).status_code == 200
            assert httpx.post(f"{server.url}/v1/chat/completions", json={}).status_code == 400
            httpx.get(f"{server.url}/no/such/path")
            wait_for(lambda: 'status="404"' in httpx.get(f"{server.url}/metrics").text)
            answer = httpx.get(f"{server.url}/metrics")
        blocks = backend.account().pool.blocks
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    chat = ("path", "/v1/chat/completions")
    assert found["vlfit_requests_total", (chat, ("status", "200"))] == 1
    assert found["vlfit_requests_total", (chat, ("status", "400"))] == 1
    assert found["vlfit_requests_total", (("path", "other"), ("status", "404"))] == 1
    assert found["vlfit_refusals_total", (("reason", "invalid_request"),)] == 1
    assert found["vlfit_tokens_total", (("kind", "generated"),)] == 3
    assert found["vlfit_kv_blocks", (("kind", "total"),)] == blocks
    assert found["vlfit_kv_blocks", (("kind", "used"),)] == 0
    assert found["vlfit_engine_requests_total", (("end", "finished"),)] == 1
    assert found["vlfit_ledger_bytes", (("kind", "actual"), ("line", "kv_cache"))] > 0
    assert found["vlfit_state", (("state", "ready"),)] == 1
    for phase in ("queue", "first_token", "decode", "total"):
        assert found["vlfit_completion_seconds_count", (("phase", phase),)] == 1


def test_a_backend_without_statistics() -> None:
    with running(ScriptedBackend()) as server:
        assert httpx.post(f"{server.url}/v1/chat/completions", json=HELLO).status_code == 200
        found = samples(httpx.get(f"{server.url}/metrics").text)
    assert ("vlfit_places", (("kind", "taken"),)) in found
    assert not any(name.startswith("vlfit_kv") for name, _ in found)


def test_histograms_add_up() -> None:
    meters = RequestMetrics()
    for first in (0.005, 0.007, 0.3, 1000.0):
        meters.record_completion(Chunk("", (), "stop", None, Timings(0.0, first, first + 0.5, 5)))
    found = samples("\n".join(meters.lines()) + "\n")

    def below(edge: str) -> float:
        return found["vlfit_completion_seconds_bucket", (("le", edge), ("phase", "first_token"))]

    assert [below(edge) for edge in ("0.005", "0.01", "0.25", "0.5", "300", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert found["vlfit_completion_seconds_sum", (("phase", "decode"),)] == 2.0


def test_label_values_are_escaped() -> None:
    label = 'a "b"\\c\nd'
    assert samples("\n".join(family_lines("x", "gauge", "X.", [({"l": label}, 1.5), ({}, None)])) + "\n") == {
        ("x", (("l", label),)): 1.5
    }


def test_json_log_lines() -> None:
    try:
        raise ValueError("see https://me:word@host/?q=1")
    except ValueError as error:
        trace = (type(error), error, error.__traceback__)
    record = logging.LogRecord(
        "vlfit.server", logging.ERROR, "", 1, "said %s", ("data:image/png;base64,AA",), trace
    )
    record.fields = {"status": 500, "note": "Bearer abcdef"}
    line = json.loads(JSONFormatter().format(record))
    assert line["message"] == "said data:..."
    assert (line["status"], line["note"], line["level"]) == (500, "Bearer ...", "error")
    assert line["time"].endswith("Z")
    assert "word" not in line["trace"]
    assert "ValueError" in line["trace"]


def test_request_lines_in_json(caplog: pytest.LogCaptureFixture) -> None:
    with running(ScriptedBackend()) as server, caplog.at_level(logging.INFO, "vlfit.server"):
        httpx.post(f"{server.url}/v1/chat/completions", json=HELLO)
        wait_for(lambda: bool(caplog.records))  # the answer is there before its line
    (record,) = caplog.records
    line = json.loads(JSONFormatter().format(record))
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
