"""The public names, pinned: adding one is a decision, losing one breaks somebody's script."""

import inspect

import pytest

import vlfit
from vlfit.api.outputs import Answer
from vlfit.client import VLM, ChatSession, Client, WordStream
from vlfit.errors import UsageError, VlfitError
from vlfit.tasks.boxes import SceneObject
from vlfit.tasks.objects import Detection, Scene


def public(thing: object) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))


def test_names_of_the_package() -> None:
    assert sorted(vlfit.__all__) == ["Answer", "Client", "VLM", "VlfitError", "__version__"]
    assert vlfit.VLM is VLM
    assert vlfit.Client is Client
    assert vlfit.Answer is Answer
    assert vlfit.VlfitError is VlfitError
    assert issubclass(UsageError, VlfitError)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = vlfit.Nonsense


METHODS = [
    *("ask", "batch", "caption", "chat", "close", "context", "detect", "embed", "embedding_size"),
    *("is_embedding_model", "model", "rerank", "scene", "sleep", "stream", "stream_caption", "wake"),
]


@pytest.mark.parametrize("way", [VLM, Client])
def test_both_ways_to_a_model_have_the_same_methods(way: type) -> None:
    assert public(way) == METHODS


def test_names_of_what_they_give() -> None:
    assert public(WordStream) == ["answer", "close", "images"]
    assert public(ChatSession) == ["ask", "history", "reset", "stream"]
    scene = ["answer", "height", "objects", "summary", "text", "usage", "warnings", "width"]
    assert public(Scene) == scene
    assert public(Detection) == ["answer", "height", "objects", "usage", "warnings", "width"]
    assert public(SceneObject) == ["box", "box_1000", "label"]
    answer = [
        "finish_reason",
        "images",
        "logprobs",
        "model",
        "pooled",
        "reasoning",
        "text",
        "timings",
        "usage",
    ]
    assert public(Answer) == answer


@pytest.mark.parametrize("way", [VLM, Client])
def test_every_public_method_is_documented_and_typed(way: type) -> None:
    for name in METHODS:
        member = inspect.getattr_static(way, name)
        function = member.fget if isinstance(member, property) else member
        assert inspect.getdoc(function), name
        assert "return" in function.__annotations__, name
