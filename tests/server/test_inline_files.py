"""Large data: URLs in bodies: taken out before parsing, with the same answers and errors as without."""

import base64
import errno
import gc
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import picture
from vlfit.errors import InvalidRequest, VlfitError
from vlfit.images.spooled_file import MIN_SPOOLED, SpooledFile
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.inline_files import (
    MIN_INLINE_FILE,
    BodyReader,
    Files,
    ReceivedBody,
    file_of,
    parse_request,
    use_files,
)
from vlfit.server.chat.preparation import file_urls, picture_urls, read_chat
from vlfit.tasks.pictures import load_picture

LARGE = picture(300, 200, "JPEG") + os.urandom(MIN_INLINE_FILE)
OTHER = picture(300, 200, "JPEG") + os.urandom(MIN_INLINE_FILE)


def url(data: bytes, header: str = "data:image/jpeg;base64") -> str:
    return f"{header},{base64.b64encode(data).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def body(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields}).encode()


def received(content: bytes, piece: int = 65_536, *, bare: bool = False) -> ReceivedBody:
    """A body that arrives in pieces of so many bytes."""
    reader = BodyReader(bare=bare)
    for position in range(0, len(content), piece):
        reader.feed(content[position : position + piece])
    return reader.finish()


def parsed(content: bytes, piece: int = 65_536) -> tuple[ChatRequest, Files]:
    return parse_request(read_chat, file_urls, received(content, piece))


def loaded(content: bytes, piece: int = 65_536) -> list[bytes]:
    """The pictures of a request, as the server reads them."""
    request, files = parsed(content, piece)
    use_files(files)
    return [bytes(load_picture(file_of(each) or each).data) for _, each in picture_urls(request)]


def test_pictures_are_taken_out_of_the_body_and_equal_ones_are_one() -> None:
    content = body(
        image(url(LARGE)),
        {"type": "text", "text": 'say "data:image/png;base64,AAAA" and \\"'},
        image(url(OTHER)),
        {"type": "image_url", "image_url": url(LARGE)},
        image(url(LARGE[:1000])),
        {"type": "video", "frames": [url(OTHER), url(LARGE)]},
        image("https://example.org/a.png"),
    )
    whole = received(content)
    assert len(whole.reduced()) < len(content) // 20
    assert len({id(file) for file in whole.files.values()}) == 2
    assert whole.whole() == content
    request, files = parsed(content)
    assert len(files) == 5
    assert loaded(content[: content.rindex(b", {")] + b"]}]}") == [
        LARGE, OTHER, LARGE, LARGE[:1000], OTHER, LARGE,
    ]  # fmt: skip
    assert request.messages[0].content[1].text == 'say "data:image/png;base64,AAAA" and \\"'  # type: ignore


@pytest.mark.parametrize("text", ["{}", 'look: "{}"', "\\\\{}", "{} and more"])
def test_a_data_url_in_a_text_stays_there(text: str) -> None:
    text = text.format(url(LARGE))
    for content in (
        body({"type": "text", "text": text}, image(url(OTHER))),
        body({"type": "text", "text": text}),
        body(image(url(OTHER)), user=text),
    ):
        request, _ = parsed(content)
        parts = request.messages[0].content
        assert isinstance(parts, list)
        assert text in (getattr(parts[0], "text", None), (request.model_extra or {}).get("user"))
        assert set(loaded(content)) <= {OTHER}


@pytest.mark.parametrize(
    "spelling",
    [
        lambda text: text.replace("/", "\\/"),
        lambda text: text.rstrip("="),
        lambda text: "\\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        lambda text: text.replace("+", "%2B"),
    ],
    ids=["escaped", "no padding", "lines", "percent"],
)
def test_base64_as_clients_write_it(spelling: Any) -> None:
    content = body(image("XX")).replace(b"XX", spelling(url(LARGE + b"\1")).encode())
    assert loaded(content) == [LARGE + b"\1"]


@pytest.mark.parametrize(
    "content",
    [
        body(image(url(LARGE)))[:-1],
        body(image(url(LARGE)), temperature="hot"),
        body(image(url(LARGE)), n="data:;base64," + "A" * MIN_INLINE_FILE * 2),
        body({"type": url(LARGE)}),
        b'{"messages": "data:image/png;base64,' + b"A" * MIN_INLINE_FILE * 2,
        b'"data:image/png;base64,' + b"A" * MIN_INLINE_FILE * 2 + b'"',
    ],
)
def test_errors_are_those_of_the_whole_body(content: bytes) -> None:
    with pytest.raises(InvalidRequest) as expected:
        read_chat(content)
    with pytest.raises(InvalidRequest) as caught:
        parsed(content)
    assert (caught.value.message, caught.value.param) == (expected.value.message, expected.value.param)


def test_no_picture_of_another_request_can_be_named() -> None:
    _, files = parsed(body(image(url(LARGE))))
    (token,) = files
    with pytest.raises(VlfitError):
        loaded(body(image(f"data:image/jpeg;base64,{token}!")))
    use_files({})
    assert file_of(f"data:image/jpeg;base64,{token}") is None


def test_base64_that_is_none_is_refused() -> None:
    with pytest.raises(VlfitError) as caught:
        loaded(body(image("data:image/jpeg;base64," + "ü!" * MIN_INLINE_FILE)))
    assert caught.value.code == "invalid_image"


@pytest.mark.parametrize("piece", [1, 7, 4096, 65_536, 10**9])
def test_pieces_of_any_size_give_the_same_files(piece: int) -> None:
    text = 'a "quoted\\" word, ' * 500
    parts = [image(url(LARGE)), {"type": "text", "text": text}, image(url(OTHER)), image(url(LARGE[:-1]))]
    content = body(*parts)
    request, files = parsed(content, piece)
    assert len(files) == 3
    assert request.messages[0].content[1].text == text  # type: ignore
    assert loaded(content, piece) == [LARGE, OTHER, LARGE[:-1]]
    assert received(content, piece).whole() == content


@pytest.mark.parametrize("piece", [997, 65_536])
@pytest.mark.parametrize(
    "content",
    [
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b'Q"',
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b'QR=="',  # bits after the last byte
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b"QQ==" + b"QUJD" * 20_000 + b'"',
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b'====="',
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b'Q\\"D"',
        b'"data:image/png;base64,' + b"QUJD" * 20_000,
        b'"data:video/jpeg;base64,' + b"QUJD" * 20_000 + b"," + b"QUJD" * 5 + b',,!,QUJD"',
        b'{"a": "' + b"QUJD" * 20_000 + b'", "b": "' + b"/+aA" * 20_000 + b'"}',
    ],
)
def test_what_arrived_can_be_restored(content: bytes, piece: int) -> None:
    for bare in (False, True):
        assert received(content, piece, bare=bare).whole() == content


@pytest.mark.parametrize("piece", [1, 2, 997, 65_536])
def test_escaped_slashes_are_base64(piece: int) -> None:
    """PHP writes them."""
    data = b"\xff" * 30_000 + LARGE  # its base64 is full of slashes
    content = body(image(url(data))).replace(b"/", b"\\/")
    whole = received(content, piece)
    assert len(whole.reduced()) < 500
    assert json.loads(whole.whole()) == json.loads(content)
    assert loaded(content, piece) == [data]
    bare = json.dumps({"images": [base64.b64encode(data).decode()]}).encode().replace(b"/", b"\\/")
    assert [file.data for file in received(bare, piece, bare=True).files.values()] == [data]


def test_frames_in_one_url_are_a_file_each() -> None:
    frames = [LARGE, OTHER, LARGE]
    joined = ",".join(base64.b64encode(frame).decode() for frame in frames)
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{joined}"}}
    content = body(part, {"type": "text", "text": "what happens?"})
    assert loaded(content) == frames
    assert len(received(content).reduced()) < 1000


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there they stay in memory")
def test_a_large_file_is_outside_of_the_heap_until_nobody_has_it() -> None:
    large = LARGE + os.urandom(2 * MIN_SPOOLED)
    gc.collect()  # what other tests left
    at_first = open_files()
    tracemalloc.start()
    try:
        whole = received(body(image(url(large)), image(url(large)), image(url(LARGE))))
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert traced < MIN_SPOOLED  # of two files of 2 MiB, whose base64 is 5.4
    spooled, again, small = whole.files.values()
    assert isinstance(spooled.data, SpooledFile)
    assert again is spooled
    assert (bytes(spooled.data), small.data) == (large, LARGE)
    before = open_files()
    assert before == at_first + 1
    del whole, again, spooled
    assert open_files() == before - 1


def open_files() -> int:
    return len([name for name in map(link_of, Path("/proc/self/fd").iterdir()) if "vlfit-picture" in name])


def link_of(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def test_without_file_descriptors_a_file_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    large = LARGE + os.urandom(2 * MIN_SPOOLED)
    assert loaded(body(image(url(large)))) == [large]


def test_reading_a_piece_takes_no_longer_late_in_a_body() -> None:
    """Bodies are read on the event loop, where 20 ms would delay every stream."""
    bodies = [
        body(image(url(os.urandom(6 * MIN_SPOOLED)))),
        body({"type": "text", "text": '"data:' * 700_000}),
        body(image(url(os.urandom(3 * MIN_SPOOLED))[:-1] + "!")),
        body({"type": "text", "text": '"data:,' * 300_000}, image(url(LARGE))),
    ]
    for content in bodies:
        seconds = []
        reader = BodyReader(bare=True)
        for position in range(0, len(content), 65_536):
            began = time.thread_time()
            reader.feed(content[position : position + 65_536])
            seconds.append(time.thread_time() - began)
        began = time.thread_time()
        reader.finish()
        seconds.append(time.thread_time() - began)
        assert sorted(seconds)[-3] < 0.02  # two may be unlucky on a busy machine
