"""Large data: URLs in bodies: taken out before parsing, with the same answers and errors as without."""

import base64
import json
import os
from typing import Any

import pytest

from tests.pictures import picture
from vlfit.errors import InvalidRequest, VlfitError
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.inline_files import (
    MAX_URLS,
    MIN_INLINE_FILE,
    Files,
    file_of,
    parse_request,
    take_files,
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


def parsed(content: bytes) -> tuple[ChatRequest, Files]:
    return parse_request(read_chat, file_urls, bytearray(content))


def loaded(content: bytes) -> list[bytes]:
    """The pictures of a request, as the server reads them."""
    request, files = parsed(content)
    use_files(files)
    return [load_picture(file_of(each) or each).data for _, each in picture_urls(request)]


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
    reduced, files = take_files(content)
    assert len(reduced) < len(content) // 20
    assert len({id(file) for file in files.values()}) == 2
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


def test_a_body_full_of_small_urls_is_not_searched_to_its_end() -> None:
    large = b'"data:image/png;base64,' + b"A" * MIN_INLINE_FILE + b'A"'
    assert len(take_files(large)[1]) == 1
    assert len(take_files(b'"data:,' * (MAX_URLS - 1) + large)[1]) == 1
    assert take_files(b'"data:,' * MAX_URLS + large)[1] == {}  # parsed as a whole instead
