"""Batches over documents, videos and RAW photos: keys, what is left out, and records."""

import json
import pickle
from pathlib import Path

import pytest

from tests.media import animation, dng, pdf, redness, video, written
from tests.pictures import picture
from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.api.sampling_params import SamplingParams
from vlfit.client import VLM
from vlfit.errors import NotAPicture, PictureError, PictureNotFound
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.job import PictureTask, Wish
from vlfit.tasks.batch.sources import SourceOptions, open_sources
from vlfit.tasks.files import MediaOptions

pytest.importorskip("pypdfium2")
pytest.importorskip("rawpy")
pytest.importorskip("av")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path, "a.jpg", picture(64, 48, "JPEG"))
    written(tmp_path, "b.pdf", pdf(3))
    written(tmp_path, "c.mp4", video(20))
    written(tmp_path, "d.dng", dng())
    written(tmp_path, "e.gif", animation("GIF"))
    written(tmp_path, "f.pdf", b"%PDF-1.7 and nothing more")
    return tmp_path


def items(arguments: list[str], options: SourceOptions | None = None) -> dict[str, Item]:
    return {item.key: item for item in open_sources(arguments, options or SourceOptions())}


def test_a_folder_counts_what_it_leaves_out_and_says_what_takes_it(folder: Path) -> None:
    source = open_sources([str(folder)])
    assert [item.key for item in source] == ["a.jpg", "e.gif"]
    assert source.count() == 2
    [note] = source.notes()
    for part in (".pdf 2", ".mp4 1", ".dng 1", "--include pdf,raw,video"):
        assert part in note


def test_documents_videos_and_raw_photos_where_asked(folder: Path) -> None:
    source = open_sources([str(folder)], SourceOptions(include=frozenset(("pdf", "raw", "video"))))
    found = {item.key: item for item in source}
    assert list(found) == ["a.jpg", "b.pdf#1", "b.pdf#2", "b.pdf#3", "c.mp4", "d.dng", "e.gif", "f.pdf"]
    assert source.count() is None
    assert source.notes() == []
    clip = found["c.mp4"].read()
    assert isinstance(clip, VideoPart)
    assert len(clip.frames) == 4
    assert isinstance(found["b.pdf#2"].read(), bytes)
    raw = found["d.dng"].read()
    assert isinstance(raw, ImagePart)
    assert raw.notes
    with pytest.raises(PictureError):
        found["f.pdf"].read()
    for item in found.values():
        assert pickle.loads(pickle.dumps(item)).key == item.key


def test_names_need_no_option(folder: Path) -> None:
    assert list(items([str(folder / "*.pdf")])) == ["b.pdf#1", "b.pdf#2", "b.pdf#3", "f.pdf"]
    named = items([f"{folder}/b.pdf#2-3", f"{folder}/c.mp4", f"{folder}/d.dng"])
    assert [key.rpartition("/")[2] for key in named] == ["b.pdf#2", "b.pdf#3", "c.mp4", "d.dng"]
    with pytest.raises(PictureNotFound):
        items([f"{folder}/gone.pdf#2"])
    with pytest.raises(PictureNotFound) as raised:
        items([f"{folder}/*.m??"])
    assert ".mp4 1" in raised.value.hint


def test_lists_name_pages_and_videos(folder: Path) -> None:
    written(folder, "list.txt", b"b.pdf#2\nb.pdf\nc.mp4\nd.dng\n")
    found = items([str(folder / "list.txt")])
    assert list(found) == ["b.pdf#2", "b.pdf", "c.mp4", "d.dng"]
    assert isinstance(found["b.pdf#2"].read(), bytes)
    assert isinstance(found["c.mp4"].read(), VideoPart)
    with pytest.raises(NotAPicture, match="3"):  # one item fails, the batch goes on
        found["b.pdf"].read()


def test_times_of_a_video_are_pictures(folder: Path) -> None:
    options = SourceOptions(media=MediaOptions(at=(0.0, 1.5)))
    found = items([str(folder / "*.mp4")], options)
    assert list(found) == ["c.mp4 at 0:00", "c.mp4 at 0:01.5"]
    assert all(isinstance(item.read(), bytes) for item in found.values())


def test_animations_are_clips_where_asked(folder: Path) -> None:
    options = SourceOptions(media=MediaOptions(clip=True))
    found = items([str(folder)], options)
    assert isinstance(found["e.gif"].read(), VideoPart)
    assert isinstance(found["a.jpg"].read(), bytes)
    [item] = items([str(folder / "e.gif")], options).values()
    assert isinstance(item.read(), VideoPart)


def test_of_an_animation_single_frames_are_items_too(folder: Path) -> None:
    options = SourceOptions(media=MediaOptions(at=(0.0, 1.0), clip=True))
    for source in (folder, folder / "e.gif"):
        found = items([str(source)], options)
        shown = [item for key, item in found.items() if "e.gif at 0:0" in key]
        reds = [redness(as_bytes(item)) for item in shown]
        assert reds == pytest.approx([0, 0.5], abs=0.03)
    assert open_sources([str(folder)], options).count() is None


def as_bytes(item: Item) -> bytes:
    data = item.read()
    assert isinstance(data, bytes)
    return data


def test_what_a_file_holds_counts_not_what_it_is_called(tmp_path: Path) -> None:
    """As in ``vlfit caption``: a PDF that is called .jpg is a page, a video a clip."""
    written(tmp_path, "list.txt", b"page.jpg\nclip.png\nraw.jpg\nreport.jpg\nphoto.jpg\n")
    written(tmp_path, "page.jpg", pdf(1))
    written(tmp_path, "clip.png", video(20))
    written(tmp_path, "raw.jpg", dng())
    written(tmp_path, "report.jpg", pdf(3))
    photo = picture(64, 48, "JPEG")
    written(tmp_path, "photo.jpg", photo)
    for sources in ([str(tmp_path)], [str(tmp_path / "*.*g")], [str(tmp_path / "list.txt")]):
        found = items(sources)
        page = found["page.jpg"].read()
        assert isinstance(page, ImagePart)
        assert bytes(page.data)[:4] != b"%PDF"
        assert isinstance(found["clip.png"].read(), VideoPart)
        assert isinstance(found["raw.jpg"].read(), ImagePart)
        assert found["photo.jpg"].read() == photo
        with pytest.raises(NotAPicture, match=r"rename .*\.pdf"):
            found["report.jpg"].read()
        pickle.loads(pickle.dumps(found["page.jpg"]))
    named = items([str(tmp_path / name) for name in ("report.jpg", "page.jpg", "photo.jpg")])
    assert [key.rpartition("/")[2] for key in named] == [
        *("report.jpg#1", "report.jpg#2", "report.jpg#3", "page.jpg#1", "photo.jpg")
    ]


def test_a_scene_is_of_a_picture(folder: Path) -> None:
    [item] = items([str(folder / "c.mp4")]).values()
    with pytest.raises(NotAPicture):
        PictureTask(Wish.scene(), SamplingParams()).load(item)


def test_a_run_over_everything(folder: Path) -> None:
    output = folder / "out.jsonl"
    with VLM("mini", device="cpu", sequences=2) as model:
        sources = [str(folder / name) for name in ("a.jpg", "b.pdf#1-2", "c.mp4", "d.dng")]
        tally = model.batch(sources, output, max_tokens=8)
        again = model.batch(sources, output, max_tokens=8)
    assert (tally.done, tally.failed, again.done, again.skipped) == (5, 0, 0, 5)
    records = {json.loads(line)["key"]: json.loads(line) for line in output.read_text().splitlines()}
    clip = next(record for key, record in records.items() if key.endswith("c.mp4"))
    assert clip["images"][0]["frames"] == 4
    raw = next(record for key, record in records.items() if key.endswith("d.dng"))
    assert (raw["images"][0]["width"], raw["images"][0]["height"]) == (120, 80)
    assert "RAW" in raw["images"][0]["notes"][0]
