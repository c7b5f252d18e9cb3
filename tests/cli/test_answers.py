"""caption, ask and scene: what is asked, what is printed, and where."""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Terminal, Vlfit
from tests.scripted_backend import ScriptedBackend, png
from tests.server.scripted import ScriptedBackend as Generating
from vlfit import client
from vlfit.api.conversation import ImagePart, TextPart
from vlfit.backends.base import Backend
from vlfit.errors import DoesNotFit, EngineStopped
from vlfit.models.registry import QWEN_THINKING
from vlfit.prompt.reasoning import Thinking
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE


@pytest.fixture
def red(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(png(640, 480, "red"))
    return path


@pytest.fixture
def blue(tmp_path: Path) -> Path:
    path = tmp_path / "blue.png"
    path.write_bytes(png(64, 64, "blue"))
    return path


def asked(backend: ScriptedBackend, call: int = 0) -> tuple[list[bytes], str]:
    """The pictures and the text of the last message of a call."""
    parts = backend.asked[call][0][-1].parts
    return (
        [bytes(part.data) for part in parts if isinstance(part, ImagePart)],
        "".join(part.text for part in parts if isinstance(part, TextPart)),
    )


def test_caption_prints_the_words_alone_on_stdout(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A red picture."]
    ended = vlfit("caption", red, "--model", "mini")
    assert (ended.code, ended.out) == (0, "A red picture.\n")
    assert asked(scripted) == ([red.read_bytes()], CAPTION_SHORT)
    assert scripted.asked[0][1].greedy
    assert scripted.closed
    (line,) = ended.err.splitlines()
    assert "mini" in line


def test_verbose_prints_what_it_took(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A red picture."]
    ended = vlfit("caption", red, "--model", "mini", "-v")
    assert (ended.code, ended.out) == (0, "A red picture.\n")
    costs = ended.err.splitlines()[-1]
    assert re.search(r"\b3 tokens\b.*\b250 ms\b.*\b8\.0 tokens/s", costs)
    assert re.search(r"\b640x480\b.*\b6 tokens\b", costs)


@pytest.mark.usefixtures("with_tiny_model")
def test_sizes_are_told_only_if_asked_for(vlfit: Vlfit, tmp_path: Path) -> None:
    for name, size in (("a.png", (900, 600)), ("b.png", (1200, 700))):
        (tmp_path / name).write_bytes(png(*size))
    words = ("caption", tmp_path / "a.png", tmp_path / "b.png", "-m", "tiny", "--max-tokens", 2)
    assert "900x600" not in vlfit(*words).err
    told = vlfit(*words, "-v").err
    assert ("900x600" in told, "1200x700" in told) == (True, True)


def test_a_note_on_pictures_is_printed_once(vlfit: Vlfit, scripted: ScriptedBackend, tmp_path: Path) -> None:
    """One that nobody expects of a photo, though its numbers differ from picture to picture."""
    scripted.answers = ["Red.", "Green.", "Blue."]
    scripted.notes = [f"damaged: {number} rows were left out" for number in range(3)]
    pictures = [tmp_path / f"{name}.png" for name in "abc"]
    for path in pictures:
        path.write_bytes(png(8, 8))
    ended = vlfit("caption", *pictures, "-m", "mini")
    assert ended.code == 0
    assert ended.err.count("damaged") == 1


def test_quiet_leaves_stderr_empty(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A red picture."]
    assert vlfit("caption", red, "-m", "mini", "-q").err == ""


def test_long_captions_and_sampling_options(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A red picture."]
    options = ("--max-tokens", 7, "--temperature", 0.5, "--top-p", 0.9, "--seed", 3)
    assert vlfit("caption", red, "-m", "mini", "--long", *options).code == 0
    assert asked(scripted)[1] == CAPTION_LONG
    sampling = scripted.asked[0][1]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.9, 3)


def test_max_tokens_of_the_environment_and_of_the_line(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLFIT_MAX_TOKENS", "50")
    scripted.answers = ["one", "two"]
    vlfit("caption", red, "-m", "mini")
    vlfit("caption", red, "-m", "mini", "--max-tokens", 7)
    assert [sampling.max_tokens for _, sampling in scripted.asked] == [50, 7]


def test_json_of_an_answer(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["Röd 红 🟥"]
    ended = vlfit("caption", red, "-m", "mini", "--json")
    assert ended.out.count("\n") == 1
    assert json.loads(ended.out) == {
        "picture": str(red),
        "model": "scripted",
        "text": "Röd 红 🟥",
        "finish_reason": "stop",
        "images": [
            {
                "width": 640,
                "height": 480,
                "seen_width": 640,
                "seen_height": 480,
                "tokens": 6,
                "frames": 1,
                "notes": [],
            }
        ],
        "usage": {
            "prompt_tokens": 16,
            "image_tokens": 0,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "total_tokens": 19,
        },
        "timings": {"queued_s": 0.0, "first_token_s": 0.25, "total_s": 0.5, "decode_tokens_per_s": 8.0},
    }


def test_several_pictures_are_named_and_one_that_fails_does_not_stop_the_others(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path
) -> None:
    scripted.answers = ["Red.", DoesNotFit("7000 tokens are more than 2048", "make it smaller"), "Blue."]
    missing = red.with_name("missing.png")
    ended = vlfit("caption", red, missing, red, blue, "-m", "mini")
    assert ended.code == 1
    assert ended.out == f"{red}: Red.\n{blue}: Blue.\n"
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert str(missing) in errors[0]
    assert errors[1] == f"error: {red}: 7000 tokens are more than 2048"
    assert re.findall(r"\d+", errors[2]) == ["2", "4"]


def test_several_pictures_as_json_are_one_line_each(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path
) -> None:
    scripted.answers = ["Red.", "Blue."]
    lines = [
        json.loads(line) for line in vlfit("caption", red, blue, "-m", "mini", "--json").out.splitlines()
    ]
    assert [(line["picture"], line["text"]) for line in lines] == [(str(red), "Red."), (str(blue), "Blue.")]


def test_a_failure_that_concerns_all_pictures_stops_the_run(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path
) -> None:
    scripted.answers = [EngineStopped("the engine is closed", "start again"), "Blue."]
    ended = vlfit("caption", red, blue, "-m", "mini")
    assert (ended.code, ended.out) == (1, "")
    assert len(scripted.asked) == 1


def test_a_glob_that_the_shell_left_alone(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path
) -> None:
    scripted.answers = ["Blue.", "Red."]
    ended = vlfit("caption", red.parent / "*.png", "-m", "mini")
    assert ended.out == f"{blue}: Blue.\n{red}: Red.\n"


def test_a_picture_on_standard_input(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["Red."]
    picture = png()
    assert vlfit("caption", "-", "-m", "mini", stdin=picture).out == "Red.\n"
    assert asked(scripted)[0] == [picture]


def test_standard_input_holds_one_picture_only(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    ended = vlfit("caption", "-", "-", "-m", "mini", stdin=png())
    assert (ended.code, ended.out) == (2, "")
    assert "2 times" in ended.err
    assert scripted.asked == []


def test_a_terminal_gets_words_as_they_come(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []

    class Recording(Terminal):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Recording())
    scripted.answers = ["A red picture."] * 2
    vlfit("caption", red, "-m", "mini")
    assert writes == ["", "A ", "red ", "picture.", "\n"]
    writes.clear()
    vlfit("caption", red, "-m", "mini", "--no-stream")
    assert writes == ["A red picture.\n"]


def test_a_terminal_is_not_driven_by_what_a_model_says(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    scripted.answers = ["\x1b[2Jgone \u4e2d\u3000 \N{FAMILY}\u200d\nnext\x9b"]
    vlfit("caption", red, "-m", "mini")
    assert screen.getvalue() == "\\x1b[2Jgone \u4e2d\u3000 \N{FAMILY}\u200d\nnext\\x9b\n"


def test_stream_into_a_pipe_when_asked(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = ["A red picture."]
    assert vlfit("caption", red, "-m", "mini", "--stream").out == "A red picture.\n"


def test_json_cannot_stream(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    ended = vlfit("caption", red, "-m", "mini", "--json", "--stream")
    assert (ended.code, ended.out) == (2, "")
    assert scripted.asked == []


@pytest.mark.parametrize(("reason", "words"), [("length", "--max-tokens"), ("loop", "repeat itself")])
def test_an_answer_that_is_not_whole_is_said(
    reason: str, words: str, vlfit: Vlfit, scripted: ScriptedBackend, red: Path
) -> None:
    scripted.answers = ["A red"]
    scripted.finish_reason = reason  # type: ignore[assignment]
    assert words in vlfit("caption", red, "-m", "mini").err


def test_ask_puts_the_last_argument_as_the_question(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path
) -> None:
    scripted.answers = ["The first."]
    ended = vlfit("ask", red, blue, "Which is larger?", "-m", "mini", "--system", "Be brief.", "--json")
    assert asked(scripted) == ([red.read_bytes(), blue.read_bytes()], "Which is larger?")
    assert scripted.asked[0][0][0].role == "system"
    facts = json.loads(ended.out)
    assert (facts["pictures"], facts["question"]) == ([str(red), str(blue)], "Which is larger?")
    assert [image["width"] for image in facts["images"]] == [640, 64]


def test_ask_without_a_picture(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["Hello."]
    assert vlfit("ask", "Who are you?", "-m", "mini").out == "Hello.\n"
    assert asked(scripted) == ([], "Who are you?")


@pytest.mark.parametrize("forgotten", ["file", "-", "https://example.org/a.png"])
def test_ask_with_the_question_forgotten(
    forgotten: str, vlfit: Vlfit, scripted: ScriptedBackend, red: Path
) -> None:
    ended = vlfit("ask", red, str(red) if forgotten == "file" else forgotten, "-m", "mini")
    assert (ended.code, ended.out) == (2, "")
    assert forgotten.removeprefix("file") in ended.err
    assert scripted.asked == []


def test_a_question_longer_than_any_file_name(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    scripted.answers = ["Yes."]
    assert vlfit("ask", "word " * 2000, "-m", "mini").code == 0


@pytest.mark.parametrize(
    "words",
    [("detect", "PICTURE", ""), ("detect", "PICTURE", " , "), ("caption", " "), ("scene", ""), ("chat", "")],
)
def test_empty_words_are_refused_before_a_model_is_loaded(
    words: tuple[str, ...], vlfit: Vlfit, scripted: ScriptedBackend, red: Path
) -> None:
    ended = vlfit(*(red if word == "PICTURE" else word for word in words), "-m", "mini")
    assert ended.code in (1, 2)
    assert ended.err.startswith("error: ")
    assert "loading" not in ended.err


def test_ask_with_an_empty_question(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    assert vlfit("ask", red, " ", "-m", "mini").code == 2


def test_an_empty_question_is_not_taken_for_a_picture(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path
) -> None:
    ended = vlfit("ask", red, "", "-m", "mini")
    assert (ended.code, ended.out) == (2, "")
    assert scripted.asked == []


def test_an_empty_name_is_not_taken_for_a_folder(vlfit: Vlfit, scripted: ScriptedBackend) -> None:
    ended = vlfit("caption", "", "-m", "mini")
    assert (ended.code, ended.out) == (1, "")
    assert scripted.asked == []


SECRET_URL = "http://me:hunter2@127.0.0.1:9/a.png?token=hunter2"


@pytest.mark.parametrize("command", ["caption", "scene"])
def test_a_url_is_named_once_and_without_its_secrets(
    command: str, vlfit: Vlfit, scripted: ScriptedBackend, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.answers = [SCENE_ANSWER]
    ended = vlfit(command, SECRET_URL, red, "-m", "mini")
    assert ended.code == 1
    assert "hunter2" not in ended.err + ended.out
    error = next(line for line in ended.err.splitlines() if line.startswith("error: "))
    assert error.count("http://127.0.0.1:9/a.png") == 1
    monkeypatch.setattr("vlfit.tasks.fetch.fetch", lambda *_, **__: png())
    scripted.answers += [SCENE_ANSWER, SCENE_ANSWER]
    assert vlfit(command, SECRET_URL, red, "-m", "mini").out.startswith("http://127.0.0.1:9/a.png: ")


def test_a_url_forgotten_to_be_asked_about_keeps_its_secrets(vlfit: Vlfit) -> None:
    assert "hunter2" not in vlfit("ask", SECRET_URL, "-m", "mini").err


SCENE_ANSWER = json.dumps(
    {
        "summary": "A cat.",
        "objects": [
            {"label": "cat", "bbox_2d": [500, 250, 100, 750]},
            {"label": "no box"},
        ],
        "text": ["STOP"],
    }
)


def test_scene_in_words(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = [SCENE_ANSWER]
    ended = vlfit("scene", red, "-m", "mini")
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "A cat.",
        "",
        "objects",
        "  cat  (64, 120, 320, 360) pixels  [500, 250, 100, 750] of 1000",
        "",
        "text",
        "  STOP",
    ]
    assert "swapped" in ended.err
    assert "object 2" in ended.err
    assert asked(scripted)[1] == SCENE


def test_scene_in_json(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = [SCENE_ANSWER]
    facts = json.loads(vlfit("scene", red, "-m", "mini", "--json").out)
    assert facts["picture"] == str(red)
    assert facts["summary"] == "A cat."
    assert facts["objects"] == [
        {"label": "cat", "box": [64, 120, 320, 360], "box_1000": [500, 250, 100, 750]}
    ]
    assert facts["words"] == ["STOP"]
    assert len(facts["warnings"]) == 2
    assert facts["text"] == SCENE_ANSWER
    assert facts["images"][0]["width"] == 640


def test_scene_that_is_no_json(vlfit: Vlfit, scripted: ScriptedBackend, red: Path, blue: Path) -> None:
    scripted.answers = ["A cat.", "A cat.", SCENE_ANSWER]
    ended = vlfit("scene", red, "-m", "mini")
    assert (ended.code, ended.out) == (1, "")
    assert "'A cat.'" in ended.err
    ended = vlfit("scene", red, blue, "-m", "mini")
    assert ended.code == 1
    assert ended.out.startswith(f"{blue}: A cat.\n")


CUPS = json.dumps([{"bbox_2d": [100, 250, 500, 750], "label": "cup"}])


@pytest.mark.parametrize("exists", [True, False])
def test_a_drawing_without_room_changes_no_file(
    vlfit: Vlfit,
    scripted: ScriptedBackend,
    red: Path,
    tmp_path: Path,
    full_disk: Callable[[], AbstractContextManager[None]],
    exists: bool,
) -> None:
    found = tmp_path / "found.png"
    if exists:
        found.write_bytes(png())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    scripted.answers = [CUPS]
    with full_disk():
        ended = vlfit("detect", red, "cups", "--draw", found, "-m", "mini")
    assert ended.code == 1
    assert str(found) in ended.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_detect_in_words_and_drawn(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, tmp_path: Path
) -> None:
    scripted.answers = [CUPS]
    ended = vlfit("detect", red, "cups", "--draw", tmp_path / "found.png", "-m", "mini")
    assert (ended.code, ended.out) == (0, "cup  (64, 120, 320, 360) pixels  [100, 250, 500, 750] of 1000\n")
    assert '"cups"' in asked(scripted)[1]
    with Image.open(tmp_path / "found.png") as drawn:
        assert drawn.size == (640, 480)
        assert drawn.getpixel((64, 240)) != drawn.getpixel((50, 240))


def test_detect_in_json_and_nothing_found(vlfit: Vlfit, scripted: ScriptedBackend, red: Path) -> None:
    scripted.answers = [CUPS, "[]", "none"]
    facts = json.loads(vlfit("detect", red, "cups", "-m", "mini", "--json").out)
    assert facts["objects"] == [
        {"label": "cup", "box": [64, 120, 320, 360], "box_1000": [100, 250, 500, 750]}
    ]
    assert (facts["width"], facts["height"]) == (640, 480)
    ended = vlfit("detect", red, "cups", "-m", "mini")
    assert (ended.code, ended.out) == (0, "")
    assert "cups" in ended.err
    assert vlfit("detect", red, "cups", "-m", "mini").code == 1
    assert vlfit("detect", red, " ", "-m", "mini").code == 2


def test_interrupted_in_the_middle(
    vlfit: Vlfit, scripted: ScriptedBackend, red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text == "red ":
                raise KeyboardInterrupt
            return super().write(text)

    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    scripted.answers = ["A red picture."]
    ended = vlfit("caption", red, "-m", "mini", "--stream")
    assert ended.code == 130
    assert screen.getvalue() == "A \n"
    assert "Traceback" not in ended.err
    assert scripted.streams[0].closed
    assert scripted.closed


def test_reasoning_is_not_printed(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, red: Path) -> None:
    """A terminal says that there is some, beside the answer; JSON has it in a field of its own."""
    backend = Generating(words=("Let me ", "see.</think>\n\n", "A red ", "circle."))
    monkeypatch.setattr(Generating, "stream", Backend.stream)
    monkeypatch.setattr(backend, "thinking", lambda _: Thinking(QWEN_THINKING, opened=True))
    monkeypatch.setattr(client, "VLM", lambda *_, **__: client.VisionModel(backend))
    ended = vlfit("ask", red, "What is this?", "--model", "mini")
    assert (ended.code, ended.out) == (0, "A red circle.\n")
    facts = json.loads(vlfit("ask", red, "What is this?", "--model", "mini", "--json").out)
    assert (facts["text"], facts["reasoning"]) == ("A red circle.", "Let me see.")
    monkeypatch.setattr(sys, "stdout", Terminal())  # where answers are streamed
    assert "thinking" in vlfit("ask", red, "What is this?", "--model", "mini").err
