"""Loading pictures: files, standard input, URLs, Pillow images; and what a server refuses."""

import base64
import io
import shlex
import socket
import sys
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from tests.pictures import encoded, half_transparent, scene
from tests.tasks.website import PNG
from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, PrivateAddress, UsageError
from vlfit.images.decode import decode
from vlfit.tasks import fetch, pictures
from vlfit.tasks.pictures import expand_globs, load_picture


def test_bytes_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(PNG)
    assert load_picture(PNG).data == PNG
    assert load_picture(file) == load_picture(str(file))
    assert load_picture(file).data == PNG
    assert load_picture(file).label == str(file)


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cat.png").write_bytes(PNG)
    assert load_picture("~/cat.png").data == PNG


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PNG)))
    assert load_picture("-").data == PNG
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(NotAPicture, match="standard input"):
        load_picture("-")


def test_standard_input_that_nobody_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PictureNotFound, match="standard input"):
        load_picture("-")


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["a.png", "b.PNG", "c.png", "d.jpg", "notes.txt"], "*.png"),
        (["a.jpeg", ".b.png", ".c.png"], "*.jpeg"),
        (["a.pdf"], "*.pdf"),
        (["notes.txt"], ""),
        ([], ""),
    ],
)
def test_a_folder_names_the_pattern_of_what_is_in_it(tmp_path: Path, names: list[str], pattern: str) -> None:
    folder = tmp_path / "my [pictures]"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(PictureNotFound, match="my ") as caught:
        load_picture(folder)
    typed = [word.rstrip(";.") for word in shlex.split(caught.value.hint) if "*" in word]
    assert [Path(word).name for word in typed] == ([pattern] if pattern else [])
    assert all(expand_globs([word]) for word in typed)
    assert ("vlfit batch" in caught.value.hint) == any(
        Path(name).suffix in (".png", ".jpeg") for name in names
    )


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PictureNotFound, match=r"nothing\.jpg") as caught:
        load_picture(tmp_path / "nothing.jpg")
    assert str(Path.cwd()) in caught.value.hint
    with pytest.raises(PictureNotFound):
        load_picture("a\0b")
    with pytest.raises(PictureNotFound, match="File name too long"):
        load_picture(base64.b64encode(PNG).decode().replace("/", "_"))
    (tmp_path / "file").write_bytes(PNG)
    with pytest.raises(PictureNotFound, match="Not a directory"):
        load_picture(tmp_path / "file" / "cat.png")
    with pytest.raises(PictureNotFound, match=r"ftp://.*http:.*https:.*data:"):
        load_picture("ftp://example.org/cat.png")
    with pytest.raises(PictureNotFound, match="file:///etc/passwd"):
        load_picture("file:///etc/passwd")


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    file = tmp_path / "page.jpg"
    file.write_bytes(b"<html>")
    with pytest.raises(NotAPicture, match=r"page\.jpg.*HTML"):
        load_picture(file)


def test_a_file_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(PictureTooLarge, match=r"/dev/zero.* 1 MiB"):
        load_picture("/dev/zero")


@pytest.mark.parametrize("size", [1, 65_537, 200_000])
def test_what_does_not_say_how_long_it_is_is_read_to_its_end(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(1, 251)) * (size // 250 + 1)
    monkeypatch.setattr(pictures, "MAX_FILE_BYTES", size)
    assert pictures._read(io.BytesIO(data[:size]), "pipe") == data[:size]
    assert pictures._read(io.BytesIO(data[:size]), "file that grew", size // 2) == data[:size]
    with pytest.raises(PictureTooLarge):
        pictures._read(io.BytesIO(data[: size + 1]), "pipe")


def test_data_urls() -> None:
    packed = base64.b64encode(PNG).decode()
    assert load_picture(f"data:image/png;base64,{packed}").data == PNG
    assert load_picture(f"DATA:;Base64,{packed.rstrip('=')}").data == PNG
    assert (
        load_picture(f"data:image/png;base64,{packed[:40]}\n {packed[40:]}", allow_private=False).data == PNG
    )
    escaped = packed.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    assert load_picture(f"data:image/png;base64,{escaped}").data == PNG
    assert load_picture("data:image/png,%89PNG%0D%0A%1A%0A").data == PNG[:8]


def test_base64_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlfit.tasks.pictures._BASE64_PIECE", 8)
    for count in range(20, 40):
        packed = base64.b64encode(PNG[:count]).decode()
        for body in (packed, packed.rstrip("="), f"{packed[:9]}\n{packed[9:]}", quote(packed)):
            assert load_picture(f"data:image/png;base64,{body}").data == PNG[:count]
    for body in ("AAAAAAA=AAAAAAAA", "AAAAAA==AAAA", "AAAAAAAAA", "AAAAAAAA!AAA"):
        with pytest.raises(NotAPicture):
            load_picture(f"data:image/png;base64,{body}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,!!!!", "base64"),
        ("data:image/png;base64,AAAAA", "base64"),
        ("data:image/png;base64,ÄÖÜ", "base64"),
        ("data:image/png;base64,", "data: URL is empty"),
        ("data:text/html,<html>", "is a web page"),
    ],
)
def test_broken_data_urls(url: str, message: str) -> None:
    with pytest.raises(NotAPicture, match=message) as caught:
        load_picture(url, allow_private=False)
    assert caught.value.hint


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr", "I"])
def test_pillow_images_lose_nothing(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 21)
    elif mode in ("RGBA", "LA"):
        image = half_transparent(mode)
    else:
        image = scene(64, 48).convert(mode)
    part = load_picture(image)
    assert part.label == "Pillow image"
    assert decode(bytes(part.data), "p").image.size == (64, 48)
    with Image.open(io.BytesIO(bytes(part.data))) as back:
        assert np.array_equal(np.asarray(back), np.asarray(image))


def test_a_pillow_image_keeps_its_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(io.BytesIO(encoded(scene(64, 48), "JPEG", exif=exif))) as image:
        assert decode(bytes(load_picture(image).data), "p").image.size == (48, 64)


def test_sources_of_other_types() -> None:
    with pytest.raises(UsageError, match="ndarray") as caught:
        load_picture(np.zeros((4, 4, 3)))  # type: ignore[arg-type]
    assert "Image.fromarray" in caught.value.hint
    with pytest.raises(NotAPicture, match="0x5"):
        load_picture(Image.new("RGB", (0, 5)))


def test_a_url(site: str) -> None:
    part = load_picture(f"{site}/picture.png?token=secret")
    assert part.data == PNG
    assert part.label == f"{site}/picture.png"


def test_redirects(site: str) -> None:
    assert load_picture(f"{site}/redirect?/redirect?{site}/picture.png").data == PNG
    with pytest.raises(PictureNotFound, match=" 5 redirects"):
        load_picture(f"{site}/loop")
    with pytest.raises(PictureNotFound, match=r"\bhttp:.*\bhttps:"):
        load_picture(f"{site}/redirect?file:///etc/passwd")
    with pytest.raises(PictureNotFound, match=r"\bhttp:.*\bhttps:"):
        load_picture(f"{site}/redirect?ftp://example.org/x")


@pytest.mark.parametrize("status", [204, 404, 403, 410, 500])
def test_answers_that_say_no(site: str, status: int) -> None:
    with pytest.raises(PictureNotFound, match=f"/{status}.* {status}") as caught:
        load_picture(f"{site}/{status}")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("page", "/page.*HTML"),
        ("json", "/json.*JSON"),
        ("nothing", "/nothing.*nothing"),
    ],
)
def test_answers_that_are_no_pictures(site: str, path: str, message: str) -> None:
    with pytest.raises(NotAPicture, match=message):
        load_picture(f"{site}/{path}")


def test_answers_that_are_too_large(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PictureTooLarge, match=r"/huge.* 64 MiB"):
        load_picture(f"{site}/huge")
    monkeypatch.setattr(fetch, "MAX_BYTES", 3 * 2**20)
    with pytest.raises(PictureTooLarge, match=r"/endless.* 3 MiB"):
        load_picture(f"{site}/endless")


@pytest.mark.parametrize("path", ["slow", "drip"])
def test_answers_that_take_too_long(site: str, path: str) -> None:
    with pytest.raises(PictureNotFound, match=r"0\.5 s"):
        load_picture(f"{site}/{path}", timeout_s=0.5)


def test_hosts_that_do_not_answer(site: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PictureNotFound, match=str(port)):
        load_picture(f"http://127.0.0.1:{port}/cat.png")
    with pytest.raises(PictureNotFound, match="gibberish"):
        load_picture(f"{site}/gibberish")
    with pytest.raises(PictureNotFound, match="https://"):
        load_picture(site.replace("http:", "https:") + "/picture.png")


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "https://[::1", "http://a b/", "http://x:99999/", "http://%"]
)
@pytest.mark.parametrize("allow_private", [True, False])
def test_urls_that_make_no_sense(url: str, allow_private: bool) -> None:
    with pytest.raises(PictureNotFound):
        load_picture(url, allow_private=allow_private)


@pytest.mark.parametrize(
    "source", ["/etc/passwd", "cat.jpg", "-", "file:///etc/passwd", "ftp://example.org/x"]
)
def test_a_server_reads_no_files(source: str) -> None:
    with pytest.raises(PrivateAddress):
        load_picture(source, allow_private=False)


def test_errors_show_no_secrets() -> None:
    label = fetch.url_label("https://user:word@example.org/a/b.png?token=secret#part")
    assert label == "https://example.org/a/b.png"
    assert len(fetch.url_label("https://example.org/" + "x" * 500)) == 120


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jpg", "a.jpg", "c.png", "odd[1].jpg", "deep/er/d.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "folder.jpg").mkdir()
    assert expand_globs(["*.jpg"]) == ["a.jpg", "b.jpg", "odd[1].jpg"]
    assert expand_globs(["c.png", "?.jpg"]) == ["c.png", "a.jpg", "b.jpg"]
    assert expand_globs(["odd[1].jpg"]) == ["odd[1].jpg"]
    assert expand_globs(["**/*.jpg"])[:3] == ["a.jpg", "b.jpg", "deep/er/d.jpg"]
    assert expand_globs(["missing.jpg", "-"]) == ["missing.jpg", "-"]
    assert expand_globs(["http://example.org/x?y=*", "data:,*"]) == ["http://example.org/x?y=*", "data:,*"]
    with pytest.raises(PictureNotFound, match=r"\*\.gif"):
        expand_globs(["*.gif"])
