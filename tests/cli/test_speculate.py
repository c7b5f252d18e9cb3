"""``--no-speculate`` and its variable: where they are read, what they reach, and what they cannot change."""

import json
from typing import Any

import pytest

from tests.cli.conftest import Vlfit
from vlfit import client
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.errors import UsageError
from vlfit.settings import read_settings


class Stopped(UsageError):
    """In place of a model."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """With what options models would have been loaded."""
    found: list[EngineOptions] = []

    def load(model: object, options: EngineOptions, progress: object = None) -> Any:
        found.append(options)
        raise Stopped("no model", "this is a test")

    monkeypatch.setattr(NativeBackend, "load", load)
    return found


@pytest.mark.parametrize("command", [("ask", "hello", "--model", "mini"), ("serve", "mini", "--port", "0")])
def test_it_reaches_the_engine(
    vlfit: Vlfit, asked: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for options in ((), ("--no-speculate",), ("--speculate",)):
        assert vlfit(*command, "--device", "cpu", *options).code == 2
    monkeypatch.setenv("VLFIT_SPECULATE", "0")
    vlfit(*command, "--device", "cpu")
    vlfit(*command, "--device", "cpu", "--speculate")
    assert [options.speculate for options in asked] == [None, False, True, False, True]


def test_it_is_an_argument_in_python(asked: list[EngineOptions]) -> None:
    for wish in (True, False):
        with pytest.raises(Stopped):
            client.VLM("mini", speculate=wish)
    assert [options.speculate for options in asked] == [True, False]


def test_it_cannot_change_a_server(vlfit: Vlfit) -> None:
    ended = vlfit("ask", "hello", "--server", "http://127.0.0.1:9", "--no-speculate")
    assert ended.code == 2
    assert "--no-speculate" in ended.err
    assert "http://127.0.0.1:9" in ended.err


def test_the_variable_is_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().speculate is None
    monkeypatch.setenv("VLFIT_SPECULATE", "no")
    assert read_settings().speculate is False
    monkeypatch.setenv("VLFIT_SPECULATE", "perhaps")
    with pytest.raises(UsageError, match="VLFIT_SPECULATE"):
        read_settings()


def test_it_is_a_wish_of_the_plan(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan", "9B", "--weights", "int4", "--context", "65536", "--kv-dtype", "fp8", "--json"]
    words += ["--gpu", "RTX 5060", "--desktop", "951MiB"]

    def planned(*options: str) -> tuple[bool, bool]:
        ended = vlfit(*words, *options)
        assert ended.code == 0
        found = json.loads(ended.out)
        assert ("--no-speculate" in found["command"]) == ("--no-speculate" in options)
        assert ("weights.draft" in {line["line"] for line in found["ledger"]}) == (
            found["settings"]["draft_model"]
        )
        return found["settings"]["speculate"], found["settings"]["draft_model"]

    assert planned() == (True, False)
    assert planned("--speculate") == (True, True)
    assert planned("--no-speculate") == (False, False)
    monkeypatch.setenv("VLFIT_SPECULATE", "1")
    assert planned() == (True, True)


def test_plans_of_vllm_take_no_notice_of_the_variable(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "2B", "--backend", "vllm", "--vllm-version", "0.25.1", "--gpu", "RTX 4090")
    monkeypatch.setenv("VLFIT_SPECULATE", "1")
    assert vlfit(*words).code == 0
    ended = vlfit(*words, "--speculate")
    assert ended.code == 2
    assert "--speculate" in ended.err
