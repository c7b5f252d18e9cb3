"""Structured output: every token keeps to the grammar, and is the model's own if that is allowed."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.api.schema_limits import MAX_PROPERTIES
from vlfit.backends.native import NativeBackend
from vlfit.engine.sampling.grammar import (
    MAX_CONCURRENT_COMPILES,
    MAX_GRAMMAR_CHARS,
    GrammarCompiler,
    GrammarMatcher,
)
from vlfit.engine.sampling.sampler import SamplingRow, sample_on_host
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


def json_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json", json.dumps(schema), "response_format")


@pytest.fixture(scope="module")
def mini() -> Iterator[NativeBackend]:
    with NativeBackend.load("mini", EngineOptions(device="cpu", max_model_len=512)) as backend:
        yield backend


@pytest.fixture(scope="module")
def compiler(mini: NativeBackend) -> GrammarCompiler:
    return mini.engine.grammar_compiler


def make_matcher(compiler: GrammarCompiler, wish: Grammar) -> GrammarMatcher:
    matcher = compiler.make_matcher(wish)
    assert matcher is not None
    return matcher


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
    wish = replace(sampling, grammar=json_grammar(COLOURS), max_tokens=300)
    answer = mini.stream(single_turn("What colour is the sky?"), wish).answer()
    found = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert set(found) == set(COLOURS["properties"])
    assert found["colour"] in ("red", "blue")
    assert isinstance(found["sure"], bool)
    assert 1 <= len(found["few"]) <= 3
    assert set(found["few"]) <= {1, 2, 3}


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_end|>b", "<|endoftext|>", "<|im_start|>", "<|image_pad|>é"]
)
def test_a_special_tokens_name_is_text_in_a_form(mini: NativeBackend, text: str) -> None:
    """It ended the answer in the middle of its JSON."""
    integer = {"type": "integer", "minimum": 1, "maximum": 3}
    named = {
        "type": "object",
        "properties": {text: integer},
        "required": [text],
        "additionalProperties": False,
    }
    pattern = {"type": "string", "pattern": f"^{re.escape(text)}$"}
    for schema in (
        {"const": text},
        pattern,
        named,
        {"type": "array", "items": {"const": text}, "minItems": 1},
    ):
        wish = SamplingParams(grammar=json_grammar(schema), max_tokens=80)
        answer = mini.stream(single_turn("Say it."), wish).answer()
        if answer.finish_reason == "stop":
            assert text in json.dumps(json.loads(answer.text), ensure_ascii=False)
        else:
            assert answer.text.count(text) > 1  # an array of many


def test_the_tags_of_a_tool_call_stay_tokens(mini: NativeBackend, compiler: GrammarCompiler) -> None:
    tokenizer = mini.engine.prompts.tokenizer
    matcher = make_matcher(compiler, Grammar("grammar", 'start: "<tool_call>" "x"'))
    [tag] = tokenizer.encode("<tool_call>", add_special_tokens=False).ids
    assert matcher.allows(tag)


def test_a_grammar_is_followed(mini: NativeBackend) -> None:
    wish = SamplingParams(grammar=Grammar("grammar", 'start: "yes" | "no"'))
    assert mini.stream(single_turn("Is it?"), wish).answer().text in ("yes", "no")


def test_what_is_checked_and_what_is_masked_agree(mini: NativeBackend, compiler: GrammarCompiler) -> None:
    """For every token of the vocabulary, at every place of an answer."""
    tokenizer = mini.engine.prompts.tokenizer
    matcher = make_matcher(compiler, json_grammar(COLOURS))
    for token_id in tokenizer.encode('{"colour": "red", "sure": true, "few": [1]}').ids:
        allowed = matcher.allowed_tokens(4096 + 8)
        assert not allowed[4096:].any(), "rows that stand for no token"
        assert [matcher.allows(each) for each in range(4096 + 8)] == allowed.tolist()
        # Where only one text may follow, its usual tokens alone are allowed; others that spell it are sound.
        assert all(follows(matcher, each) for each in np.flatnonzero(allowed).tolist())
        if allowed.sum() > 1:
            assert [follows(matcher, each) for each in range(4096)] == allowed[:4096].tolist()
        assert allowed[token_id]
        matcher.accept_token(token_id)
    end = set(mini.engine.generation.eos_token_ids)
    assert set(np.flatnonzero(matcher.allowed_tokens(4096)).tolist()) == end, "whole: only its end may follow"


def follows(matcher: GrammarMatcher, token_id: int) -> bool:
    """Whether llguidance accepts ``token_id`` next, without a bitmask."""
    return matcher._matcher.validate_tokens([matcher._canonical_token(token_id)]) == 1


class AllowedOnly:
    """A grammar matcher that always allows the same tokens."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def allows(self, token_id: int) -> bool:
        return token_id in self.token_ids

    def allowed_tokens(self, vocabulary: int) -> Any:
        return np.isin(np.arange(vocabulary), self.token_ids)


def sampled(row: torch.Tensor, sampling: SamplingParams, only: AllowedOnly, times: int = 1) -> list[Any]:
    draws = [SamplingRow(sampling, [], [], 5, position, only) for position in range(times)]  # type: ignore[arg-type]
    return sample_on_host(row.expand(times, -1), row.expand(times, -1).argmax(-1).tolist(), None, draws, str)


def test_the_likeliest_of_what_is_allowed() -> None:
    row = torch.tensor([0.0, 3.0, 2.0, 1.0])
    assert sampled(row, SamplingParams(), AllowedOnly(0, 3))[0].token_id == 3
    assert sampled(row, SamplingParams(), AllowedOnly(0, 1))[0].token_id == 1


def test_logprobs_are_the_models_own() -> None:
    row = torch.tensor([0.0, 3.0, 2.0, 1.0])
    found = sampled(row, SamplingParams(top_logprobs=1), AllowedOnly(3))[0]
    assert found.token_id == 3
    assert found.logprobs[0].logprob == pytest.approx(float(row.log_softmax(-1)[3]))
    assert found.logprobs[0].top[0].token_id == 1


@pytest.mark.parametrize("top_k", [0, 3])
def test_what_is_allowed_keeps_its_share(top_k: int) -> None:
    """What is sampled is sampled among the allowed: of those each has its share."""
    row = torch.tensor([1.0, 2.0, 1.5, -20.0])
    sampling = SamplingParams(temperature=1.0, top_k=top_k)
    tokens = [each.token_id for each in sampled(row, sampling, AllowedOnly(0, 2), 4000)]
    share = float(torch.softmax(row[[0, 2]], -1)[0])
    assert set(tokens) == {0, 2}
    assert tokens.count(0) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "wish",
    [
        json_grammar({"type": "wrong"}),
        json_grammar({"type": "object", "not": {"type": "string"}}),
        Grammar("json", "no JSON", "response_format"),
        Grammar("json", "[]", "response_format"),
        Grammar("json", '{"description": "' + "x" * MAX_GRAMMAR_CHARS + '"}', "response_format"),
        Grammar("grammar", "start: nowhere", "response_format"),
        json_grammar({"$ref": "#"}),
        json_grammar({"type": "array", "minItems": 10**9}),
    ],
    ids=["type", "keyword", "text", "list", "long", "grammar", "nothing but itself", "endless"],
)
def test_a_form_that_cannot_be_followed_is_refused(mini: NativeBackend, wish: Grammar) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mini.prepare(single_turn("Hello"), SamplingParams(grammar=wish))
    assert refused.value.param == "response_format"
    assert "\n" not in refused.value.message


def test_a_form_without_a_way_on_ends_the_request(compiler: GrammarCompiler) -> None:
    matcher = make_matcher(compiler, json_grammar(COLOURS))
    matcher.accept_token(5)  # no brace
    assert not matcher.allows(6)
    with pytest.raises(InvalidRequest):
        matcher.allowed_tokens(4096)


def test_a_form_with_too_many_ways_on_is_the_requests_failure(mini: NativeBackend) -> None:
    """Which shows only within the list, and names the field that the form came in."""
    one = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(100)}}
    ways = [{"$ref": "#/$defs/one", "required": [f"p{number}"]} for number in range(100)]
    two = {"type": "array", "items": {"anyOf": ways}, "minItems": 1}
    wish = SamplingParams(grammar=json_grammar({"$defs": {"one": one}, **two}), max_tokens=50)
    with pytest.raises(InvalidRequest) as failed:
        mini.stream(single_turn("Hello"), wish).answer()
    assert failed.value.param == "response_format"
    assert mini.stream(single_turn("Hello"), SamplingParams(max_tokens=1)).answer().text, "others go on"


def test_too_many_ways_on_after_the_first_brace_are_refused_at_once(mini: NativeBackend) -> None:
    """Before a stream would have begun."""
    one = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(100)}}
    ways = [{"$ref": "#/$defs/one", "required": [f"p{number}"]} for number in range(100)]
    with pytest.raises(InvalidRequest) as refused:
        mini.prepare(
            single_turn("Hello"),
            SamplingParams(grammar=json_grammar({"$defs": {"one": one}, "anyOf": ways})),
        )
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kind", ["string", ["string", "number", "integer", "boolean", "null", "array"]])
def test_as_many_optional_properties_as_a_schema_may_have(
    mini: NativeBackend, compiler: GrammarCompiler, kind: str | list[str], closed: bool
) -> None:
    properties = {f"p{number}": {"type": kind} for number in range(MAX_PROPERTIES)}
    schema = {"type": "object", "properties": properties} | (
        {"additionalProperties": False} if closed else {}
    )
    matcher = make_matcher(compiler, json_grammar(schema))
    text = f'{{"p0": "a", "p7": "b", "p{MAX_PROPERTIES - 1}": "c"}}'
    for token_id in mini.engine.prompts.tokenizer.encode(text, add_special_tokens=False).ids:
        assert matcher.allows(token_id)
        assert matcher.bitmask().any()
        matcher.accept_token(token_id)
    assert matcher.allows(mini.engine.generation.eos_token_ids[0])


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (json_grammar({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (json_grammar({"type": "string", "pattern": "["}), "class"),
        (json_grammar({"type": "string", "pattern": "[" + "a" * 5000}), "class"),
        (Grammar("grammar", "start: /(?=a)b/", "response_format"), "look-ahead"),
        (json_grammar({"$ref": "#"}), "itself"),
        (Grammar("json", "[]", "response_format"), "JSON object"),
    ],
    ids=["look-ahead", "bracket", "long", "grammar", "nothing but itself", "list"],
)
def test_a_refusal_says_why(compiler: GrammarCompiler, wish: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.make_matcher(wish)
    assert reason in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 700


class SlowCompiler:
    """Compiles until ``go`` is set."""

    go = Event()
    grammar_from_json_schema = staticmethod(LLMatcher.grammar_from_json_schema)

    def __init__(self, *_: object, **__: object) -> None:
        self.go.wait(60)


def test_a_grammar_that_compiles_too_long(mini: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are refused while as many compile as may at once, until one of these is done."""
    compiler = GrammarCompiler(mini.engine.prompts.tokenizer, mini.engine.generation.eos_token_ids)
    make_matcher(compiler, json_grammar(COLOURS))
    monkeypatch.setattr("vlfit.engine.sampling.grammar.COMPILE_TIMEOUT_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr("llguidance.LLMatcher", SlowCompiler)
        for number in range(MAX_CONCURRENT_COMPILES):
            with pytest.raises(InvalidRequest, match=r"0\.05"):
                compiler.make_matcher(json_grammar({"const": number}))
    make_matcher(compiler, json_grammar(COLOURS))  # cached
    with pytest.raises(QueueFull):
        compiler.make_matcher(json_grammar({"type": "integer"}))
    SlowCompiler.go.set()
    monkeypatch.setattr("vlfit.engine.sampling.grammar.COMPILE_TIMEOUT_SECONDS", 60.0)
    make_matcher(compiler, json_grammar({"type": "integer"}))
