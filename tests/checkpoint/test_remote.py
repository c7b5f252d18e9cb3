"""Headers of a hub checkpoint by HTTP ranges, against a hub on this computer."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hub import Hub, running_hub
from vlfit.checkpoint import remote_headers as remote
from vlfit.checkpoint.headers import INDEX_FILE, SINGLE_FILE
from vlfit.checkpoint.remote_headers import read_remote_checkpoint
from vlfit.checkpoint.source import read_checkpoint
from vlfit.errors import (
    HubAccessDenied,
    HubError,
    HubModelNotFound,
    HubUnreachable,
    NotACheckpoint,
    NotDownloaded,
    UnknownArchitecture,
)

NAME = "org/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def sizes(folder: Path) -> dict[str, int]:
    return {name: info.bytes for name, info in read_checkpoint("tiny", folder).tensors.items()}


@pytest.mark.parametrize("kind", ["tied", "fp8_untied_sharded"])
def test_sizes_are_those_of_the_files(hub: Hub, tiny: Callable[[str], Path], kind: str) -> None:
    hub.add(NAME, tiny(kind))
    checkpoint = read_remote_checkpoint(NAME)
    assert {name: info.bytes for name, info in checkpoint.tensors.items()} == sizes(tiny(kind))
    assert checkpoint.name == NAME


def test_a_long_header_takes_a_second_request_and_no_weights_come(
    hub: Hub, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_HEADER_PREFIX_BYTES", 512)
    hub.add(NAME, tiny("tied"))
    assert {name: info.bytes for name, info in read_remote_checkpoint(NAME).tensors.items()} == sizes(
        tiny("tied")
    )
    starts = [request.bytes_from for request in hub.downloads(SINGLE_FILE)]
    assert starts == [0, 512]


def test_a_token_that_is_set_is_used(
    hub: Hub, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, tiny("tied"), gated=True)
    with pytest.raises(HubAccessDenied, match=NAME):
        read_remote_checkpoint(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_goodtoken")
    assert read_remote_checkpoint(NAME).tensors


def test_errors_of_the_hub(hub: Hub, tiny: Callable[[str], Path]) -> None:
    with pytest.raises(HubModelNotFound, match="org/none"):
        read_remote_checkpoint("org/none")
    hub.add(NAME, tiny("tied"))
    with pytest.raises(HubModelNotFound, match=r"\bv9\b"):
        read_remote_checkpoint(f"{NAME}@v9")
    del hub.repositories[NAME].files[SINGLE_FILE]
    with pytest.raises(HubModelNotFound, match="safetensors"):
        read_remote_checkpoint(NAME)
    del hub.repositories[NAME].files["config.json"]
    with pytest.raises(NotACheckpoint, match=r"config\.json") as caught:
        read_remote_checkpoint(NAME)
    assert "GGUF" in caught.value.hint
    hub.repositories[NAME].fail_with = 503
    with pytest.raises(HubUnreachable, match=r"\b503\b"):
        read_remote_checkpoint(NAME)


def test_another_architecture_is_refused_before_its_weights_are_asked_for(
    hub: Hub, tiny: Callable[[str], Path]
) -> None:
    files = hub.add(NAME, tiny("tied")).files
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**config, "model_type": "mamba"}).encode()
    with pytest.raises(UnknownArchitecture, match="mamba"):
        read_remote_checkpoint(NAME)
    assert hub.downloads(SINGLE_FILE) == []


PAGE = b"<!doctype html><html>sign in</html>"


@pytest.mark.parametrize(
    ("file", "sent", "words"),
    [
        (SINGLE_FILE, PAGE, "HTML"),
        (SINGLE_FILE, b"\x08\0\0\0\0\0\0\0not JSON", "JSON"),
        (SINGLE_FILE, b"\xff" * 64, f"{2**64 - 1:,} bytes"),
        ("config.json", PAGE, "page"),
        ("config.json", b'{"model_type": "qwen', "20 bytes"),
        ("config.json", b"[]", "2 bytes"),
        ("config.json", b"", "0 bytes"),
        ("config.json", b"\xff\xfe\0", "3 bytes"),
        (INDEX_FILE, PAGE, "page"),
    ],
)
def test_answers_that_no_hub_sends(
    hub: Hub, tiny: Callable[[str], Path], file: str, sent: bytes, words: str
) -> None:
    """A login page of a hotel, a broken mirror: the error names no temporary file."""
    hub.add(NAME, tiny("tied")).files[file] = sent
    with pytest.raises(HubError) as raised:
        read_remote_checkpoint(NAME)
    for fact in (file, words, hub.url):
        assert fact in raised.value.message
    assert f"{hub.url}/{NAME}" in raised.value.hint
    assert "vlfit pull" not in raised.value.hint  # as for a file that is there
    assert "vlfit-plan-" not in str(raised.value)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Range": "bytes 0-1/9000"}, r"\b2 .*\b9,000 bytes .*config\.json"),
        ({"Content-Range": "bytes nonsense"}, r"config\.json"),
        ({}, r"config\.json"),
    ],
)
def test_invalid_ranges(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], words: str) -> None:
    from huggingface_hub import constants

    class Liar(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(206)
            for name, value in {**headers, "Content-Length": "2"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            with pytest.raises(HubError) as raised:
                read_remote_checkpoint(NAME)
        finally:
            server.shutdown()
            thread.join()
    assert re.search(words, raised.value.message)


def test_a_silent_hub_is_not_waited_for(
    hub: Hub, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_READ_TIMEOUT_S", 0.3)
    hub.add(NAME, tiny("tied"), stall_after=100)
    with pytest.raises(HubUnreachable, match="ReadTimeout"):
        read_remote_checkpoint(NAME)


def test_no_network_a_wrong_address_and_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match="ConnectError"):
        read_remote_checkpoint(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "huggingface.co")
    with pytest.raises(HubError, match=r"huggingface\.co"):
        read_remote_checkpoint(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotDownloaded, match="HF_HUB_OFFLINE"):
        read_remote_checkpoint(NAME)
