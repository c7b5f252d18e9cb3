"""Documents and videos over HTTP: OpenAI's ``file`` parts, vLLM's ``video_url``, servers without them."""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.media import animation, dng, pdf, video
from tests.pictures import picture
from tests.server.harness import running
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.images.limits import CLIENT_PICTURES
from vlfit.server.server_settings import ServerSettings

pytest.importorskip("pypdfium2")
pytest.importorskip("rawpy")
pytest.importorskip("av")

Post = Callable[..., httpx.Response]

JPEG = picture(64, 48, "JPEG")
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), EngineOptions(device="cpu", max_model_len=1024)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(backend: NativeBackend) -> Iterator[str]:
    limits = replace(CLIENT_PICTURES, media=("pdf", "raw", "video"))
    with running(backend, ServerSettings(decode_limits=limits, picture_limit=20)) as server:
        yield server.url


@pytest.fixture(scope="module")
def plain_url(backend: NativeBackend) -> Iterator[str]:
    with running(backend, ServerSettings()) as server:
        yield server.url


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def document(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), **more}}


def clip(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **more}}


def ask(url: str, *parts: dict[str, Any]) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def seen(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    images: list[dict[str, Any]] = reply.json()["vlfit"]["images"]
    return images


def test_pages_of_a_document_are_pictures(url: str) -> None:
    images = seen(ask(url, document(pdf(2), filename="report.pdf")))
    assert [(image["width"], image["height"], image["frames"]) for image in images] == [(1240, 1754, 1)] * 2


def test_what_does_not_fit_is_left_out_and_noted(url: str) -> None:
    images = seen(ask(url, document(pdf(60), filename="report.pdf")))
    assert 1 <= len(images) <= 20
    assert re.search(rf"\breport\.pdf\b.*\b{len(images)}\b.*\b60\b", images[0]["notes"][0])
    assert all("of 60" not in note for image in images[1:] for note in image["notes"])


def test_a_video_file_is_a_clip(url: str) -> None:
    [image] = seen(ask(url, clip(video(30))))
    assert image["frames"] == 6
    [fewer] = seen(ask(url, clip(video(30), fps=1.0)))
    assert fewer["frames"] == 3


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_in_video_url_is_a_clip(url: str, file_format: str) -> None:
    data = animation(file_format)  # 2 s
    [image] = seen(ask(url, clip(data)))
    assert image["frames"] == 4
    [fewer] = seen(ask(url, clip(data, every="1s")))
    assert fewer["frames"] == 2
    [first] = seen(ask(url, {"type": "image_url", "image_url": {"url": data_url(data, "image/gif")}}))
    assert first["frames"] == 1


@pytest.mark.parametrize("data", [video(30), animation("GIF")], ids=["video", "gif"])
def test_frames_are_chosen_by_times(url: str, data: bytes) -> None:
    images = seen(ask(url, clip(data, at=["0:01", 0.5])))
    assert [(image["frames"], image["width"]) for image in images] == [(1, images[0]["width"])] * 2
    [one] = seen(ask(url, clip(data, at=1)))
    assert one["frames"] == 1
    [spaced] = seen(ask(url, clip(data, every=1)))
    assert spaced["frames"] == (2 if data[:3] == b"GIF" else 3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"every": "2"}, "every"),
        ({"every": 0}, "every"),
        ({"every": 1e-9}, "every"),
        ({"every": True}, "every"),
        ({"every": {}}, "every"),
        ({"every": 10**400}, "every"),
        ({"at": {}}, "at"),
        ({"at": [True]}, "at[0]"),
        ({"at": 10**400}, "at[0]"),
        ({"at": 1e300}, "at"),
        ({"at": []}, "at"),
        ({"every": "1s", "fps": 1.0}, "every"),
        ({"every": 1, "at": 1}, "at"),
        ({"at": "soon"}, "at"),
        ({"at": -1}, "at"),
        ({"at": "9" * 5000}, "at"),
        ({"at": list(range(21))}, "at"),
        ({"at": "1:00"}, "url"),  # after the end
    ],
)
def test_wrong_choices_of_frames_are_named(url: str, fields: dict[str, Any], field: str) -> None:
    reply = ask(url, clip(animation("GIF"), **fields))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages[0].content[0].video_url.{field}"


def test_a_clip_of_named_frames_has_no_others_to_choose(url: str) -> None:
    part = {"url": f"data:video/jpeg;base64,{base64.b64encode(JPEG).decode()}", "every": "1s"}
    reply = ask(url, {"type": "video_url", "video_url": part})
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        "messages[0].content[0].video_url.every",
    )


def test_pages_are_chosen_in_the_name_of_a_file(url: str) -> None:
    assert len(seen(ask(url, document(pdf(5), filename="report.pdf#2-3")))) == 2
    part = {"type": "input_file", "filename": "a.pdf#5", "file_data": data_url(pdf(5), "application/pdf")}
    body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}
    assert len(seen(httpx.post(f"{url}/v1/responses", json=body, timeout=60))) == 1
    for data, name in ((pdf(5), "a.pdf#0"), (pdf(5), "a.pdf#9"), (JPEG, "a.pdf#1")):
        reply = ask(url, document(data, filename=name))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("messages[0].content[0].file")


def test_unknown_fields_of_parts_are_listed(url: str) -> None:
    part = document(pdf(1), pages="2-3")
    reply = ask(url, {**part, "cache_control": {"type": "ephemeral"}, "page": 1})
    assert reply.json()["vlfit"]["ignored"] == [
        "messages[0].content[0].page",
        "messages[0].content[0].file.pages",
    ]
    content = [{"type": "input_text", "text": "Hello", "size": 2}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1}
    reply = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert reply.json()["vlfit"]["ignored"] == ["input[0].content[0].size"]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "file", "file": {"file_data": base64.b64encode(pdf(1)).decode()}}, "application/pdf"),
        ({"type": "image_url", "image_url": {"url": base64.b64encode(pdf(1)).decode()}}, "application/pdf"),
        ({"type": "image_url", "image_url": {"url": base64.b64encode(JPEG).decode()}}, "image/jpeg"),
        ({"type": "video_url", "video_url": {"url": "AAAA"}}, "video/mp4"),
    ],
)
def test_bare_base64_is_told_the_url_of_its_kind(url: str, part: dict[str, Any], kind: str) -> None:
    assert f"data:{kind};base64," in ask(url, part).json()["error"]["message"]


def test_a_raw_photo_is_its_preview(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(dng(), "image/x-adobe-dng")}}
    [image] = seen(ask(url, part))
    assert (image["width"], image["height"]) == (120, 80)
    assert "RAW" in image["notes"][0]


@pytest.mark.parametrize("as_what", ["file", "video_url", "image_url", "anthropic", "ollama"])
@pytest.mark.parametrize(("data", "size"), [(JPEG, (64, 48)), (pdf(1), (1240, 1754)), (dng(), (120, 80))])
def test_the_content_decides_whatever_a_part_calls_it(
    url: str, as_what: str, data: bytes, size: tuple[int, int]
) -> None:
    """Each kind of file in each kind of part, with a media type of something else."""
    encoded = base64.b64encode(data).decode()
    if as_what == "anthropic":
        source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
        content: list[dict[str, Any]] = [{"type": "document", "source": source}, TEXT]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "model": "tied"}
        reply = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    elif as_what == "ollama":
        message = {"role": "user", "content": "What is this?", "images": [encoded]}
        body = {"messages": [message], "options": {"num_predict": 1}, "stream": False}
        reply = httpx.post(f"{url}/api/chat", json={**body, "model": "tied"}, timeout=60)
    else:
        parts = {
            "file": document(data, filename="report.pdf"),
            "video_url": clip(data),
            "image_url": {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}},
        }
        reply = ask(url, parts[as_what])
    assert [(image["width"], image["height"]) for image in seen(reply)] == [size]


def test_the_responses_api_takes_files_too(url: str) -> None:
    part = {"type": "input_file", "filename": "a.pdf", "file_data": data_url(pdf(1), "application/pdf")}
    content = [part, {"type": "input_text", "text": "What is this?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1}
    reply = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert [image["width"] for image in seen(reply)] == [1240]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "file", "file": {"file_id": "file-7"}}, "messages[0].content[0].file.file_id"),
        ({"type": "file", "file": {}}, "messages[0].content[0].file.file_data"),
        (document(b"%PDF-1.7 and nothing more"), "messages[0].content[0].file.file_data"),
        (clip(b"\x00\x00\x00\x18ftypisom and nothing"), "messages[0].content[0].video_url.url"),
        (document(b"words"), "messages[0].content[0].file.file_data"),
    ],
)
def test_what_cannot_be_read_is_named(url: str, part: dict[str, Any], param: str) -> None:
    reply = ask(url, part)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (document(pdf(1)), "pdf"),
        (clip(video(5)), "video"),
        (document(dng()), "raw"),
        (clip(animation("GIF")), "video"),
    ],
)
def test_a_server_takes_them_only_if_told_to(plain_url: str, part: dict[str, Any], kind: str) -> None:
    reply = ask(plain_url, part)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "invalid_image"
    assert f"--image-formats default,{kind}" in error["message"]
