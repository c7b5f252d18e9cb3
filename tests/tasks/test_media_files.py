"""Documents, videos and RAW photos as parts: names of pages, times, and how many fit into the context."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.media import animation, dng, pdf, redness, video, written
from vlfit.api.conversation import ImagePart, TextPart, VideoPart, single_turn
from vlfit.client import VLM
from vlfit.errors import InvalidRequest, NotAPicture, PictureNotFound, UsageError
from vlfit.tasks.describe import caption_prompt
from vlfit.tasks.files import (
    MediaFile,
    MediaOptions,
    format_time,
    load_file,
    parse_frame_distance,
    parse_times,
    single_parts,
    single_picture,
    split_pages,
)

pytest.importorskip("pypdfium2")
pytest.importorskip("rawpy")
pytest.importorskip("av")


@pytest.mark.parametrize(
    ("name", "file", "pages"),
    [
        ("report.pdf", "report.pdf", ()),
        ("report.pdf#3", "report.pdf", ((3, 3),)),
        ("a/Report.PDF#2-5,9", "a/Report.PDF", ((2, 5), (9, 9))),
        ("report.pdf#4-", "report.pdf", ((4, 0),)),
        ("https://example.org/a.pdf#2", "https://example.org/a.pdf", ((2, 2),)),
        ("photo.jpg#3", "photo.jpg#3", ()),
        ("report.pdf#page", "report.pdf#page", ()),
    ],
)
def test_pages_behind_a_name(name: str, file: str, pages: tuple[tuple[int, int], ...]) -> None:
    assert split_pages(name) == (file, pages)


@pytest.mark.parametrize("name", ["a.pdf#0", "a.pdf#5-2"])
def test_pages_that_there_cannot_be(name: str) -> None:
    with pytest.raises(UsageError):
        split_pages(name)


def test_times() -> None:
    assert parse_times(["0:35", "1:02:03,7.5"]) == (35.0, 3723.0, 7.5)
    assert parse_times(["1s,0s", "1.5 s", "500ms", "2m", "1h"]) == (1.0, 0.0, 1.5, 0.5, 120.0, 3600.0)
    assert list(map(format_time, (35, 3723, 7.5))) == ["0:35", "1:02:03", "0:07.5"]
    for text in ("soon", "1:2:3:4", "-5", "0:35s", "2d", "s", "-1s"):
        with pytest.raises(UsageError):
            parse_times([text])


def test_a_name_that_exists_is_that_file(tmp_path: Path) -> None:
    """``report.pdf#3`` may be a file of its own."""
    written(tmp_path, "a.pdf", pdf(3))
    own = written(tmp_path, "a.pdf#3", pdf(1))
    found = load_file(str(own))
    assert isinstance(found, MediaFile)
    assert (found.file, found.num_pages) == (own, 1)


def test_every_source_of_a_document_is_one(tmp_path: Path) -> None:
    path = written(tmp_path, "a.pdf", pdf(4))
    for source in (path, str(path), path.read_bytes()):
        found = load_file(source)
        assert isinstance(found, MediaFile)
        assert [part.label.rpartition("#")[2] for part in found.pages()] == ["1", "2", "3", "4"]
    some = load_file(f"{path}#2-3")
    assert isinstance(some, MediaFile)
    assert [part.label for part in some.pages()] == [f"{path}#2", f"{path}#3"]
    with pytest.raises(PictureNotFound):
        load_file(str(tmp_path / "gone.pdf#2"))
    with pytest.raises(NotAPicture, match="4 pages"):
        single_picture(load_file(f"{path}#7"))


def test_what_is_left_out_is_noted_once(tmp_path: Path) -> None:
    found = load_file(written(tmp_path, "a.pdf", pdf(5)))
    assert isinstance(found, MediaFile)
    parts = found.pages(2)
    assert [len(part.notes) for part in parts] == [1, 0]
    assert "2 of 5" in parts[0].notes[0]


def test_one_picture_of_a_file_that_has_more(tmp_path: Path) -> None:
    document = written(tmp_path, "a.pdf", pdf(3))
    assert single_picture(load_file(f"{document}#2")).label == f"{document}#2"
    with pytest.raises(UsageError, match="3 pages"):
        single_picture(load_file(document))
    clip = written(tmp_path, "a.mp4", video())
    with pytest.raises(UsageError):
        single_picture(load_file(clip))
    frame = single_picture(load_file(clip, MediaOptions(at=(2.0,))))
    assert redness(bytes(frame.data)) == pytest.approx(0.4, abs=0.06)


def test_what_is_looked_at_by_itself(tmp_path: Path) -> None:
    document, clip = written(tmp_path, "a.pdf", pdf(10)), written(tmp_path, "a.mp4", video())
    pages = list(single_parts(load_file(document), clips=False))
    assert [getattr(part, "label", "") for part in pages] == [
        f"{document}#{number}" for number in range(1, 11)
    ]
    assert len(list(single_parts(load_file(clip), clips=True))) == 1
    with pytest.raises(UsageError):
        list(single_parts(load_file(clip), clips=False))
    assert len(list(single_parts(load_file(clip, MediaOptions(every=2.0)), clips=False))) == 3
    assert len(list(single_parts(load_file(clip, MediaOptions(at=(0, 1))), clips=True))) == 2


def test_a_raw_photo_is_its_preview_and_says_so(tmp_path: Path) -> None:
    for source in (written(tmp_path, "a.dng", dng()), dng()):
        found = load_file(source)
        assert isinstance(found, ImagePart)
        assert Image.open(io.BytesIO(bytes(found.data))).size == (120, 80)
        assert len(found.notes) == 1


def test_animations_are_clips_where_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "a.gif", animation("GIF"))
    assert isinstance(load_file(path), ImagePart)
    found = load_file(path, MediaOptions(every=0.4, clip=True))
    assert isinstance(found, MediaFile)
    assert found.clip().fps == pytest.approx(2.5)
    assert isinstance(load_file(written(tmp_path, "a.png", still()), MediaOptions(clip=True)), ImagePart)


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2.0), ("500ms", 0.5), (" 0.25 s", 0.25), ("1m", 60.0)])
def test_the_time_between_frames(text: str, seconds: float) -> None:
    assert parse_frame_distance(text, "--every") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0s", "0", "0ms", "2", "often", "", "-1s", "9" * 5000])
def test_what_is_no_time_between_frames(text: str) -> None:
    with pytest.raises(UsageError, match="--every") as failure:
        parse_frame_distance(text, "--every")
    assert "frames" in failure.value.hint
    assert "wait" not in failure.value.message


def test_a_time_is_short(tmp_path: Path) -> None:
    for text in ("9" * 5000, f"{'0' * 5000}:01"):
        with pytest.raises(UsageError):
            parse_times([text])
    path = written(tmp_path, "a.gif", animation("GIF"))
    [first, last] = single_parts(load_file(path, MediaOptions(at=(0.0, 1.9), clip=True)), clips=False)
    assert isinstance(first, ImagePart)
    assert isinstance(last, ImagePart)
    assert redness(bytes(last.data)) == pytest.approx(0.9, abs=0.03)


def still() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def vlm() -> Callable[..., VLM]:
    return lambda context=1024: VLM("mini", device="cpu", context=context)


def test_as_many_pages_as_fit_the_context(vlm: Callable[..., VLM], tmp_path: Path) -> None:
    path = written(tmp_path, "a.pdf", pdf(9))
    with vlm() as model:
        answer = model.ask("What is this?", path, max_tokens=8)
        assert 5 <= len(answer.images) <= 7
        assert answer.usage.prompt_tokens < 1024
        assert f"{len(answer.images)} of 9" in answer.images[0].notes[0]
        two = model.ask("What is this?", f"{path}#3-4", max_tokens=8)
        assert len(two.images) == 2
        assert all("of 9" not in note for image in two.images for note in image.notes)


def test_as_many_frames_as_fit_the_context(vlm: Callable[..., VLM], tmp_path: Path) -> None:
    path = written(tmp_path, "a.mp4", video(100))
    with vlm() as model:
        whole = model.caption(path, max_tokens=8)
        assert 12 <= whole.images[0].frames <= 16
    with vlm(256) as model:
        less = model.ask("What happens?", path, max_tokens=8)
        assert less.images[0].frames < 12
        assert less.images[0].notes
        chat = model.chat(max_tokens=8)
        chat.ask("What happens?", f"{written(tmp_path, 'a.pdf', pdf(1))}")
        assert [type(part) for part in chat.history[0].parts] == [ImagePart, TextPart]


def test_frames_are_pictures_for_a_model_without_clips(tmp_path: Path) -> None:
    from tests.scripted_backend import ScriptedBackend
    from vlfit.tasks.files import fit_conversation

    found = load_file(written(tmp_path, "a.mp4", video()))
    seen: list[list[type]] = []

    def run(conversation: tuple[object, ...]) -> None:
        parts = conversation[0].parts  # type: ignore[attr-defined]
        seen.append([type(part) for part in parts])
        if any(isinstance(part, VideoPart) for part in parts):
            raise InvalidRequest("no clips")

    conversation = single_turn("What?", found)  # type: ignore[arg-type]
    fit_conversation(ScriptedBackend([]), conversation, run)
    assert seen[0] == [VideoPart, TextPart]
    assert seen[1] == [ImagePart] * 8 + [TextPart]


def test_a_clip_is_captioned_in_words_of_its_own() -> None:
    assert "video" in caption_prompt(VideoPart((b"",)), "short")
    assert "picture" in caption_prompt(ImagePart(b""), "long")
