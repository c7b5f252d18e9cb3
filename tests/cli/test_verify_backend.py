"""``vlfit verify --backend``: transformers in process, our own server as ``remote``, and servers at fault."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vlfit
from tests.server.harness import Running, running
from tests.tiny import TINY, build_tiny
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.backends.transformers.backend import TransformersBackend
from vlfit.checkpoint.source import mini_folder
from vlfit.server.server_settings import ServerSettings
from vlfit.verify import verify_run

# Each engine of a check is collected by itself.
pytestmark = pytest.mark.usefixtures("only_its_own_to_collect")
Tiny = Callable[[str], Path]


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Running]:
    chosen = EngineOptions(device="cpu", max_model_len=1024, **options)
    with NativeBackend.load(folder, chosen) as backend, running(backend, ServerSettings()) as server:
        yield server


def told(vlfit: Vlfit, *arguments: object, code: int = 0) -> dict[str, Any]:
    ended = vlfit("verify", *arguments, "--json")
    assert ended.code == code, ended.out + ended.err
    return dict(json.loads(ended.out))


def test_transformers(vlfit: Vlfit, tiny: Tiny) -> None:
    found = told(vlfit, tiny("tied"), "--backend", "transformers", "--device", "cpu")
    compared = {(each["stage"], each["condition"]) for each in found["checks"]["measured"]}
    assert {("prompt_tokens", "text"), ("logprobs", "text"), ("logprobs", "picture")} <= compared
    assert ("answer", "picture, 3 at once") in compared
    assert found["checks"]["facts"]["dtype"] == "float32"
    skipped = {each["check"] for each in found["checks"]["skipped"]}
    assert {"positions", "KV cache", "boxes and words"} <= skipped
    assert found["speed"]["tokens_per_s"] > 0
    assert found["memory"]["why_no_lines"]


def test_the_row_of_transformers_names_it_and_what_it_obeys(vlfit: Vlfit, tiny: Tiny) -> None:
    ask = ("verify", tiny("tied"), "--quick", "--share", "--device", "cpu", "--backend", "transformers")
    ended = vlfit(*ask, "--dtype", "bfloat16", "--chunk", 77)
    assert ended.code == 0, ended.err
    model = ended.out.splitlines()[-1].split("|")[4]
    assert "transformers" in model
    assert "bfloat16" in model
    assert "77" not in model


def test_transformers_on_a_device_that_fails(vlfit: Vlfit, tiny: Tiny, monkeypatch: Any) -> None:
    """Neither the speed nor the first question is measured; there is a report all the same."""

    def fail(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(verify_run, "run_requests", fail)
    monkeypatch.setattr(TransformersBackend, "stream", fail)
    ask = (tiny("tied"), "--backend", "transformers", "--device", "cpu")
    found = told(vlfit, *ask, code=1)
    assert [(each["code"], each["stage"]) for each in found["checks"]["findings"]] == [
        ("device_failed", "speed")
    ]
    assert found["speed"] is None
    assert any(each["check"].startswith("everything") for each in found["checks"]["skipped"])


def test_our_own_server(vlfit: Vlfit, tiny: Tiny) -> None:
    with serving(tiny("tied")) as server:
        found = told(vlfit, tiny("tied"), "--backend", "remote", server.url)
        exact = told(vlfit, tiny("tied"), "--server", server.url, "--dtype", "float32")
    assert found["machine"] == {"device": "a server", "backend": "remote"}
    tolerances = [
        next(each["tolerance"] for each in one["checks"]["measured"] if each["stage"] == "logprobs")
        for one in (found, exact)
    ]
    assert tolerances[0] > 100 * tolerances[1]  # 16 bits, as nobody said otherwise
    compared = {(each["stage"], each["condition"]) for each in exact["checks"]["measured"]}
    assert {("logprobs", "clip"), ("pixels", "picture")} <= compared


def test_a_server_in_bfloat16(vlfit: Vlfit) -> None:
    """Words and boxes of mini, too, by the server's own name of the model."""
    with serving(mini_folder(), dtype="bfloat16") as server:
        found = told(vlfit, "mini", "--backend", "remote", server.url)
    stages = [each["stage"] for each in found["checks"]["measured"]]
    assert (stages.count("words"), stages.count("boxes")) == (3, 4)


def test_a_server_of_other_weights(vlfit: Vlfit, tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(TINY, "tied", replace(TINY["tied"], seed=77))
    other = build_tiny("tied", tmp_path / "other")
    with serving(other) as server:
        found = told(vlfit, tiny("tied"), "--backend", "remote", server.url, "--quick", code=1)
    first = found["checks"]["findings"][0]
    assert (first["code"], first["condition"]) == ("logprobs_differ", "text")
    assert first["measured"] > first["tolerance"] > 0
    assert first["likely"] == "backend"
    assert first["way_around"]


def test_a_server_that_shrinks_pictures(vlfit: Vlfit, tiny: Tiny) -> None:
    with serving(tiny("tied"), image_tokens=16) as server:
        found = told(vlfit, tiny("tied"), "--backend", "remote", server.url, "--quick", code=1)
    first = found["checks"]["findings"][0]
    assert (first["code"], first["component"]) == ("prompt_tokens_differ", "pictures")
    assert first["condition"] == "picture"


def test_a_server_whose_tower_is_wrong(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is right, so that the tower is named."""
    from vlfit.models.qwen3_vl import vision

    inner = vision.VisionTower._embed

    def embed(self: Any, patches: Any, rows: int, columns: int) -> Any:
        return inner(self, patches.flip(0), rows, columns)

    monkeypatch.setattr(vision.VisionTower, "_embed", embed)
    with serving(mini_folder()) as server:
        found = told(vlfit, "mini", "--backend", "remote", server.url, "--quick", code=1)
    first = found["checks"]["findings"][0]
    assert (first["code"], first["component"], first["condition"]) == ("logprobs_differ", "tower", "picture")


@pytest.mark.parametrize(
    "flags",
    [
        ("--backend", "vllm"),
        ("--backend", "remote"),
        ("--backend", "transformers", "--kernels", "plain"),
        ("--backend", "transformers", "--against", "mini"),
        ("--server", "http://127.0.0.1:9", "--context", "512"),
    ],
)
def test_what_does_not_go_together_is_refused(vlfit: Vlfit, flags: tuple[str, ...]) -> None:
    assert vlfit("verify", "mini", *flags).code == 2


def test_what_is_shared_names_no_server(vlfit: Vlfit, tiny: Tiny) -> None:
    with serving(tiny("tied")) as server:
        ended = vlfit("verify", tiny("tied"), "--server", server.url, "--quick", "--share")
    assert ended.code == 0
    assert "127.0.0.1" not in ended.out
