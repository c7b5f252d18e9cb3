"""``BackendSpec`` before a backend is opened, and the arguments of the Python API."""

import pickle
from typing import Any

import pytest

from tests.scripted_backend import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.backends import opening
from vlfit.backends.opening import BACKEND_KINDS, BackendSpec, open_backend, parse_backend_kind
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.client import VLM
from vlfit.errors import NotACheckpoint, UsageError


@pytest.mark.parametrize(
    "wishes",
    [
        {"kind": "llama", "model": "mini"},
        {"kind": "remote"},
        {"kind": "native", "model": "mini", "server": "http://a"},
        {"kind": "vllm"},
        {},
    ],
)
def test_invalid_specs_are_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BackendSpec(**wishes)


def test_specs_pickle_and_hide_their_key() -> None:
    """Nodes of a cluster open the same backend."""
    wanted = BackendSpec(
        kind="remote", server="http://a", api_key="secret", options=EngineOptions(max_model_len=99)
    )
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    assert "secret" not in repr(wanted)


def test_every_kind_has_an_opener() -> None:
    assert set(opening._OPENERS) == set(BACKEND_KINDS) == {parse_backend_kind(kind) for kind in BACKEND_KINDS}
    for kind in ("native", "transformers"):
        with pytest.raises(NotACheckpoint):
            open_backend(BackendSpec(kind=parse_backend_kind(kind), model="/no/such/folder"))


def test_vlm_opens_the_named_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BackendSpec] = []

    def opened(wanted: BackendSpec, progress: object) -> ScriptedBackend:
        asked.append(wanted)
        return ScriptedBackend([])

    monkeypatch.setattr(opening, "open_backend", opened)
    with VLM("a/b", backend="transformers", trust_remote_code=True, context=99) as vlm:
        assert (asked[0].kind, asked[0].model, asked[0].trust_remote_code) == ("transformers", "a/b", True)
        assert asked[0].options.max_model_len == 99
        for rest in (vlm.sleep, vlm.wake):
            with pytest.raises(UsageError):
                rest()
    VLM("a/b", backend="vllm", vllm=VllmOptions(python="/there")).close()
    assert asked[1].vllm is not None
    assert asked[1].vllm.python == "/there"
    assert asked[1].vllm.diagnose_log is not None, "with the doctor, who knows why a start failed"
    with pytest.raises(UsageError):
        VLM(backend="transformers")
    assert len(asked) == 2
