"""Structured output: every token keeps to the grammar, and is the model's own if that is allowed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from vlfit.api.conversation import ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.engine.sampling.grammar import (
    MAX_CONCURRENT_COMPILES,
    MAX_GRAMMAR_CHARS,
    GrammarCompiler,
    GrammarMatcher,
)
from vlfit.engine.sampling.sampler import SamplingRow, sample
from vlfit.errors import InvalidRequest, QueueFull

COLOURS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "sure": {"type": "boolean"},
        "few": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "sure", "few"],
    "additionalProperties": False,
}


def form(schema: dict[str, Any]) -> Grammar:
    return Grammar("json", json.dumps(schema), "response_format")


@pytest.fixture(scope="module")
def mini() -> Iterator[NativeBackend]:
    with NativeBackend.load("mini", EngineOptions(device="cpu", max_model_len=512)) as backend:
        yield backend


@pytest.fixture(scope="module")
def constraints(mini: NativeBackend) -> GrammarCompiler:
    return mini.engine.grammar_compiler


def begin(constraints: GrammarCompiler, wish: Grammar) -> GrammarMatcher:
    constraint = constraints.matcher(wish)
    assert constraint is not None
    return constraint


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=20, seed=3),
        SamplingParams(temperature=2.0, seed=4),
        SamplingParams(top_logprobs=2, repetition_penalty=1.1),
    ],
    ids=["greedy", "a few", "all", "penalties"],
)
def test_an_answer_has_the_form_that_was_asked_for(mini: NativeBackend, sampling: SamplingParams) -> None:
    wish = replace(sampling, grammar=form(COLOURS), max_tokens=300)
    answer = mini.stream(ask("What colour is the sky?"), wish).answer()
    found = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert set(found) == set(COLOURS["properties"])
    assert found["colour"] in ("red", "blue")
    assert isinstance(found["sure"], bool)
    assert 1 <= len(found["few"]) <= 3
    assert set(found["few"]) <= {1, 2, 3}


def test_a_grammar_is_followed(mini: NativeBackend) -> None:
    wish = SamplingParams(grammar=Grammar("grammar", 'start: "yes" | "no"'))
    assert mini.stream(ask("Is it?"), wish).answer().text in ("yes", "no")


def test_what_is_checked_and_what_is_masked_agree(mini: NativeBackend, constraints: GrammarCompiler) -> None:
    """For every token of the vocabulary, at every place of an answer."""
    tokenizer = mini.engine.prompts.tokenizer
    constraint = begin(constraints, form(COLOURS))
    for token_id in tokenizer.encode('{"colour": "red", "sure": true, "few": [1]}').ids:
        allowed = constraint.allowed_tokens(4096 + 8)
        assert not allowed[4096:].any(), "rows that stand for no token"
        assert [constraint.allows(each) for each in range(4096 + 8)] == allowed.tolist()
        # Where only one text may follow, its usual tokens alone are allowed; others that spell it are sound.
        assert all(follows(constraint, each) for each in np.flatnonzero(allowed).tolist())
        if allowed.sum() > 1:
            assert [follows(constraint, each) for each in range(4096)] == allowed[:4096].tolist()
        assert allowed[token_id]
        constraint.accept_token(token_id)
    end = set(mini.engine.generation.eos_token_ids)
    assert set(np.flatnonzero(constraint.allowed_tokens(4096)).tolist()) == end, (
        "whole: only its end may follow"
    )


def follows(constraint: GrammarMatcher, token_id: int) -> bool:
    """What llguidance says of a token alone."""
    return constraint._matcher.validate_tokens([constraint._canonical_token(token_id)]) == 1


class Only:
    """Allows some tokens."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def allows(self, token_id: int) -> bool:
        return token_id in self.token_ids

    def allowed_tokens(self, vocabulary: int) -> Any:
        return np.isin(np.arange(vocabulary), self.token_ids)


def drawn(row: torch.Tensor, sampling: SamplingParams, only: Only, times: int = 1) -> list[Any]:
    draws = [SamplingRow(sampling, [], [], 5, position, only) for position in range(times)]  # type: ignore[arg-type]
    return sample(row.expand(times, -1), row.expand(times, -1).argmax(-1).tolist(), None, draws, str)


def test_the_likeliest_of_what_is_allowed() -> None:
    row = torch.tensor([0.0, 3.0, 2.0, 1.0])
    assert drawn(row, SamplingParams(), Only(0, 3))[0].token_id == 3
    assert drawn(row, SamplingParams(), Only(0, 1))[0].token_id == 1


def test_logprobs_are_the_models_own() -> None:
    row = torch.tensor([0.0, 3.0, 2.0, 1.0])
    found = drawn(row, SamplingParams(top_logprobs=1), Only(3))[0]
    assert found.token_id == 3
    assert found.logprobs[0].logprob == pytest.approx(float(row.log_softmax(-1)[3]))
    assert found.logprobs[0].top[0].token_id == 1


@pytest.mark.parametrize("top_k", [0, 3])
def test_what_is_allowed_keeps_its_share(top_k: int) -> None:
    """What is drawn is drawn among the allowed: of those each has its share."""
    row = torch.tensor([1.0, 2.0, 1.5, -20.0])
    sampling = SamplingParams(temperature=1.0, top_k=top_k)
    tokens = [each.token_id for each in drawn(row, sampling, Only(0, 2), 4000)]
    share = float(torch.softmax(row[[0, 2]], -1)[0])
    assert set(tokens) == {0, 2}
    assert tokens.count(0) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "wish",
    [
        form({"type": "wrong"}),
        form({"type": "object", "not": {"type": "string"}}),
        Grammar("json", "no JSON", "response_format"),
        Grammar("json", "[]", "response_format"),
        Grammar("json", '{"description": "' + "x" * MAX_GRAMMAR_CHARS + '"}', "response_format"),
        Grammar("grammar", "start: nowhere", "response_format"),
        form({"$ref": "#"}),
        form({"type": "array", "minItems": 10**9}),
    ],
    ids=["type", "keyword", "text", "list", "long", "grammar", "nothing but itself", "endless"],
)
def test_a_form_that_cannot_be_followed_is_refused(mini: NativeBackend, wish: Grammar) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mini.prepare(ask("Hello"), SamplingParams(grammar=wish))
    assert refused.value.param == "response_format"
    assert "\n" not in refused.value.message


def test_a_form_without_a_way_on_ends_the_request(constraints: GrammarCompiler) -> None:
    constraint = begin(constraints, form(COLOURS))
    constraint.accept_token(5)  # no brace
    assert not constraint.allows(6)
    with pytest.raises(InvalidRequest):
        constraint.allowed_tokens(4096)


def test_a_form_with_too_many_ways_on_is_the_requests_failure(mini: NativeBackend) -> None:
    """Which shows only when there is a brace, and names the field that the form came in."""
    one = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(40)}}
    wish = SamplingParams(grammar=form({"anyOf": [one] * 50}), max_tokens=50)
    with pytest.raises(InvalidRequest) as failed:
        mini.stream(ask("Hello"), wish).answer()
    assert failed.value.param == "response_format"
    assert mini.stream(ask("Hello"), SamplingParams(max_tokens=1)).answer().text, "others go on"


class Stuck:
    """Reads forms until it is let go."""

    go = Event()
    grammar_from_json_schema = staticmethod(LLMatcher.grammar_from_json_schema)

    def __init__(self, *_: object, **__: object) -> None:
        self.go.wait(60)


def test_a_form_that_takes_long_is_given_up(mini: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are others' when as many are being read as may be, until one of them is done."""
    constraints = GrammarCompiler(mini.engine.prompts.tokenizer, mini.engine.generation.eos_token_ids)
    begin(constraints, form(COLOURS))
    monkeypatch.setattr("vlfit.engine.sampling.grammar.COMPILE_TIMEOUT_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr("llguidance.LLMatcher", Stuck)
        for number in range(MAX_CONCURRENT_COMPILES):
            with pytest.raises(InvalidRequest, match=r"0\.05"):
                constraints.matcher(form({"const": number}))
    begin(constraints, form(COLOURS))  # read before
    with pytest.raises(QueueFull):
        constraints.matcher(form({"type": "integer"}))
    Stuck.go.set()
    monkeypatch.setattr("vlfit.engine.sampling.grammar.COMPILE_TIMEOUT_SECONDS", 60.0)
    begin(constraints, form({"type": "integer"}))
