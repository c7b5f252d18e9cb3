"""What is wanted of a backend, before any is opened; and what the Python API makes of its arguments."""

import pickle
from typing import Any

import pytest

from tests.scripted_backend import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.backends import opening
from vlfit.backends.opening import KINDS, BackendSpec, open_backend, parse_kind
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
def test_wishes_that_make_no_sense(wishes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BackendSpec(**wishes)


def test_a_wish_goes_to_other_processes_and_keeps_its_key_to_itself() -> None:
    """Machines of a cluster open what one of them was told to."""
    wanted = BackendSpec(
        kind="remote", server="http://a", api_key="secret", options=EngineOptions(max_model_len=99)
    )
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    assert "secret" not in repr(wanted)


def test_every_kind_has_its_opener() -> None:
    assert set(opening._OPENERS) == set(KINDS) == {parse_kind(kind) for kind in KINDS}
    for kind in ("native", "transformers"):
        with pytest.raises(NotACheckpoint):
            open_backend(BackendSpec(kind=parse_kind(kind), model="/no/such/folder"))


def test_what_python_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BackendSpec] = []

    def opened(wanted: BackendSpec, progress: object) -> ScriptedBackend:
        asked.append(wanted)
        return ScriptedBackend([])

    monkeypatch.setattr(opening, "open_backend", opened)
    with VLM("a/b", backend="transformers", trust_remote_code=True, context=99) as vlm:
        assert (asked[0].kind, asked[0].model, asked[0].trust_remote_code) == ("transformers", "a/b", True)
        assert asked[0].options.max_model_len == 99
        for rest in (vlm.sleep, vlm.wake):
            with pytest.raises(UsageError, match="native"):
                rest()
    VLM("a/b", backend="vllm", vllm=VllmOptions(python="/there")).close()
    assert asked[1].vllm is not None
    assert asked[1].vllm.python == "/there"
    assert asked[1].vllm.read_failure is not None, "with the doctor, who knows why a start failed"
    with pytest.raises(UsageError, match="by name"):
        VLM(backend="transformers")
    assert len(asked) == 2
