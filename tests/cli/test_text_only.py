"""A text-only model on the command line: asked, planned for, and refused where pictures are meant."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.pictures import picture

TinyDecoder = Callable[[str], Path]
CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(picture(64, 64))
    return path


@pytest.mark.parametrize("name", ["qwen2", "qwen3_fp8", "llama2", "phi3_long"])
def test_it_answers(vlfit: Vlfit, tiny_decoder: TinyDecoder, name: str) -> None:
    ended = vlfit("ask", "--model", tiny_decoder(name), "hello", "--max-tokens", 3, "--json")
    assert ended.code == 0
    facts = json.loads(ended.out)
    assert facts["usage"]["completion_tokens"] == 3
    assert facts["usage"]["image_tokens"] == 0


def test_it_chats(vlfit: Vlfit, tiny_decoder: TinyDecoder) -> None:
    ended = vlfit("chat", "--model", tiny_decoder("llama2"), "--max-tokens", 2, stdin="hello\nand?\n")
    assert ended.code == 0


@pytest.mark.parametrize("command", [("caption",), ("scene",), ("ask",)])
def test_pictures_are_refused_before_anything_is_loaded(
    vlfit: Vlfit, tiny_decoder: TinyDecoder, photo: Path, command: tuple[str, ...]
) -> None:
    question = ("what is this?",) if command == ("ask",) else ()
    ended = vlfit(*command, "--model", tiny_decoder("qwen2"), photo, *question)
    assert ended.code == 2
    assert "qwen2" in ended.err
    assert "hint:" in ended.err
    assert "loading" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("name", ["qwen2", "qwen3_fp8", "llama2", "phi3"])
def test_it_is_planned_for(vlfit: Vlfit, tiny_decoder: TinyDecoder, name: str) -> None:
    ended = vlfit("plan", tiny_decoder(name), *CARD, "--json")
    assert ended.code == 0
    facts = json.loads(ended.out)
    assert facts["backend"] == "native"
    assert facts["settings"]["image_tokens"] == 0
    assert facts["command"][:2] == ["vlfit", "serve"]
    sizes = {line["line"]: line["bytes"] for line in facts["ledger"]}
    assert sizes["weights.text"] > 0
    assert sizes["weights.vision"] == sizes["vision_workspace"] == 0


def test_a_context_may_be_longer_than_its_window(vlfit: Vlfit, tiny_decoder: TinyDecoder) -> None:
    """Beyond the positions that it was trained with it is refused."""
    assert vlfit("ask", "--model", tiny_decoder("phi3"), "--context", 3000, "hello").code == 0
    ended = vlfit("ask", "--model", tiny_decoder("phi3"), "--context", 5000, "hello")
    assert ended.code == 2
    assert "4096" in ended.err
