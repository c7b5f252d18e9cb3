"""``--image-formats``: which picture files a server decodes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.pictures import picture
from tests.server.harness import running
from tests.server.pictures import data_url
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.cli.serving.serve_here import _decode_limits
from vlfit.errors import UsageError
from vlfit.images.limits import CLIENT_PICTURES, FORMATS, SERVER_FORMATS
from vlfit.server.server_settings import ServerSettings
from vlfit.settings import read_settings

RARE = ("TIFF", "JPEG2000", "PPM", "QOI")


@pytest.fixture(scope="module")
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), EngineOptions(device="cpu", max_model_len=512)) as loaded:
        yield loaded


def show(url: str, file_format: str) -> httpx.Response:
    # A media type says nothing: the file's first bytes do.
    part = {"type": "image_url", "image_url": {"url": data_url(picture(64, 48, file_format), "image/png")}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_the_setting_chooses_formats_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _decode_limits(read_settings()) == CLIENT_PICTURES
    assert _decode_limits(read_settings(image_formats="default")) == CLIENT_PICTURES
    media = ("pdf", "raw", "video")
    every = replace(CLIENT_PICTURES, formats=FORMATS, media=media)
    assert _decode_limits(read_settings(image_formats="all")) == every
    some = replace(CLIENT_PICTURES, media=("pdf", "video"))
    assert _decode_limits(read_settings(image_formats="default, video,pdf")) == some
    monkeypatch.setenv("VLFIT_IMAGE_FORMATS", "all")
    assert read_settings().image_formats == "all"
    with pytest.raises(UsageError) as caught:
        read_settings(image_formats="tiff")
    assert caught.value.param == "image_formats"
    assert set(FORMATS) - set(SERVER_FORMATS) == set(RARE)


def test_a_server_takes_common_formats_and_all_if_told_to(backend: NativeBackend) -> None:
    with running(backend) as server:
        for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"):
            assert show(server.url, file_format).status_code == 200
        for file_format in RARE:
            refused = show(server.url, file_format)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "invalid_image"
            assert "--image-formats all" in error["message"]
    settings = ServerSettings(decode_limits=replace(CLIENT_PICTURES, formats=FORMATS))
    with running(backend, settings) as server:
        for file_format in RARE:
            assert show(server.url, file_format).status_code == 200
