"""chat: lines from a pipe and from a person, commands, memory, stopping."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal, Vlfit
from tests.scripted_backend import ScriptedBackend, png
from vlfit.api.conversation import ImagePart, TextPart
from vlfit.cli.main import main
from vlfit.errors import DoesNotFit


@pytest.fixture
def red(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(png())
    return path


def turns(backend: ScriptedBackend, call: int = -1) -> list[str]:
    """Every message of a call, pictures as <picture>."""
    return [
        "".join("<picture>" if isinstance(part, ImagePart) else part.text for part in message.parts)  # type: ignore[union-attr]
        for message in backend.asked[call][0]
    ]


def test_lines_of_a_pipe_are_messages_with_memory(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A cat.", "Grey."]
    ended = vlfit("chat", red, "-m", "mini", stdin="What is this?\n\nWhat colour?\n")
    assert (ended.code, ended.out) == (0, "A cat.\nGrey.\n")
    assert turns(scripted) == ["<picture>What is this?", "A cat.", "What colour?"]
    assert scripted.asked[0][1] == scripted.default_sampling()
    assert scripted.closed


def test_commands(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["Hello.", "A cat.", "Nothing."]
    lines = ["Hi", f"/image {red}", "What is this?", "/reset", "/help", "Still there?", "/quit", "Not read"]
    ended = vlfit("chat", "-m", "mini", "--system", "Be brief.", stdin="\n".join(lines))
    assert (ended.code, ended.out) == (0, "Hello.\nA cat.\nNothing.\n")
    assert turns(scripted, 1) == ["Be brief.", "Hi", "Hello.", "<picture>What is this?"]
    assert turns(scripted, 2) == ["Be brief.", "Still there?"]
    assert "/reset" in ended.err


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye", "/bye now"])
def test_words_that_end_it(vlfit: Vlfit, scripted: ScriptedBackend, word: str) -> None:
    scripted.answers = ["Hello."]
    ended = vlfit("chat", "-m", "mini", stdin=f"Hi\n{word}\nNot read\n")
    assert (ended.code, ended.out) == (0, "Hello.\n")


def test_a_closed_stdin_is_the_end(
    vlfit: Vlfit, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vlfit", "chat", "-m", "mini"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdin.close()
    assert ended.value.code == 0
    assert scripted.asked == []


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ('"{0}/with space.png"', 1),
        ("'{0}/with space.png' {0}/red.png", 2),
        ("{0}/with space.png", 1),
        ("{0}/with*.png", 1),
        ("{0}/with sp*.png", 1),
        ("{0}/red.png {0}/it's.png", 0),  # a quotation mark that is not closed
        ("{0}/it's.png", 1),
        ("{0}/red.png   {0}/red.png {0}/*.png", 5),
        pytest.param(
            "{0}/with\\ space.png {0}/red.png",
            2,
            marks=pytest.mark.skipif(os.name != "posix", reason="Windows has backslashes in paths"),
        ),
    ],
)
def test_pictures_of_one_line(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, typed: str, count: int
) -> None:
    for name in ("with space.png", "it's.png"):
        (red.parent / name).write_bytes(png())
    scripted.answers = ["Cats."]
    ended = vlfit("chat", "-m", "mini", stdin=f"/image {typed.format(red.parent)}\nWhat?\n")
    assert ended.code == (count == 0)
    assert turns(scripted) == ["<picture>" * count + "What?"]


def test_options_go_on_top_of_the_checkpoints_own_sampling(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["Hello."]
    vlfit("chat", "-m", "mini", "--temperature", 0, "--max-tokens", 5, stdin="Hi\n")
    sampling = scripted.asked[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 0.8, 5)


def test_a_line_that_fails_is_reported_and_the_next_one_works(
    vlfit: Vlfit, scripted: ScriptedBackend
) -> None:
    scripted.answers = [DoesNotFit("too long", "say less"), "Hello."]
    lines = ["A very long message", "/image", "/image missing.png", "/wave", "/path/to/it is a message"]
    ended = vlfit("chat", "-m", "mini", stdin="\n".join(lines))
    assert (ended.code, ended.out) == (1, "Hello.\n")
    assert turns(scripted) == ["/path/to/it is a message"]
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert "too long" in errors[0]
    assert "missing.png" in errors[2]
    assert "/wave" in errors[3]


def test_json_lines(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["Hello.", "Bye."]
    ended = vlfit("chat", "-m", "mini", "--json", stdin="Hi\nGo\n")
    facts = [json.loads(line) for line in ended.out.splitlines()]
    assert [(fact["message"], fact["text"]) for fact in facts] == [("Hi", "Hello."), ("Go", "Bye.")]


def test_a_picture_cannot_come_from_where_the_messages_come(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    ended = vlfit("chat", "-", "-m", "mini", stdin=png())
    assert ended.code == 2
    assert scripted.asked == []


def test_bytes_that_are_no_letters_do_not_end_it(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["What?"]
    assert vlfit("chat", "-m", "mini", stdin=b"\xff\xfe\n").out == "What?\n"


def test_a_person_typing_with_words_into_a_pipe(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    """Prompts belong to stderr then: stdout holds the words alone."""
    scripted.answers = ["Hello."]
    ended = vlfit("chat", "-m", "mini", stdin=Terminal("Hi\n/nonsense\n"))
    assert (ended.code, ended.out) == (0, "Hello.\n")
    assert ended.err.count("> ") == 3
    assert "/help" in ended.err


def test_interrupting_an_answer_returns_to_the_prompt(
    vlfit: Vlfit, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text == "two ":
                raise KeyboardInterrupt
            return super().write(text)

    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    scripted.answers = ["one two three", "Fine."]
    ended = vlfit("chat", "-m", "mini", "--stream", stdin=Terminal("Count.\nHow are you?\n"))
    assert ended.code == 0
    assert screen.getvalue() == "one \nFine.\n"
    assert scripted.streams[0].closed
    assert turns(scripted) == ["Count.", "one two ", "How are you?"]
    assert TextPart("How are you?") in scripted.asked[1][0][-1].parts


def test_interrupting_a_run_from_a_pipe_ends_it(
    vlfit: Vlfit, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Interrupting())
    scripted.answers = ["one two three"]
    assert vlfit("chat", "-m", "mini", stdin="Count.\n").code == 130
