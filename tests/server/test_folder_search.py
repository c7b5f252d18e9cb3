"""``/v1/vlfit/search`` over a folder that mini has indexed: results, small pictures, keys, refusals."""

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.pictures import picture
from tests.server.asking import error_of
from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings
from vlfit.tasks.search.indexing import update_index
from vlfit.tasks.search.searching import BackendEmbedder
from vlfit.tasks.search.vector_index import VectorIndex, index_path

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("search") / "photos"
    root.mkdir()
    (root / "wide.png").write_bytes(picture(900, 300, seed=1))
    (root / "small & odd#name.png").write_bytes(picture(40, 30, seed=2))
    outside = root.parent / "outside.png"
    outside.write_bytes(picture(50, 50, seed=3))
    (root / "link.png").symlink_to(outside)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
        with NativeBackend.load("mini", options) as mini:
            with VectorIndex(index_path(folder), folder) as index:
                update_index(index, folder, lambda: BackendEmbedder(mini))
            with running(mini, ServerSettings(search=folder, api_keys=("secret",))) as running_server:
                yield running_server


def get(server: Running, route: str = "", headers: dict[str, str] = KEY, **params: str) -> httpx.Response:
    url = f"{server.url}/v1/vlfit/search{route}"
    return httpx.get(url, params=params, headers=headers, timeout=60)


def test_results_and_their_small_pictures(server: Running) -> None:
    answer = get(server, q="a picture", n="2")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["model"] == "mini"
    assert len(told["results"]) == 2
    scores = [each["score"] for each in told["results"]]
    assert scores == sorted(scores, reverse=True)
    for name, size in (("wide.png", (320, 106)), ("small & odd#name.png", (40, 30))):
        small = get(server, "/picture", path=name, key=name)
        assert small.status_code == 200, small.text
        assert small.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(small.content)) as image:
            assert image.size == size


@pytest.mark.parametrize(
    "name", ["../outside.png", "/etc/passwd", "link.png", "missing.png", "", "a\0b", "wide.png#2"]
)
def test_pictures_outside_and_unknown_ones(server: Running, name: str) -> None:
    refused = get(server, "/picture", path=name, key=name)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "invalid_image"


def test_it_needs_the_key(server: Running) -> None:
    for route in ("", "/picture"):
        assert get(server, route, headers={}, q="x").status_code == 401


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({}, "q"),
        ({"q": "x", "n": "0"}, "n"),
        ({"q": "x", "n": "0000000010000"}, "n"),
        ({"q": "x", "n": "1" * 5_000}, "n"),
        ({"q": "x", "n": "000000001" + "9" * 5_000}, "n"),
        ({"q": "x" * 2001}, "q"),
    ],
)
def test_queries_that_are_refused(server: Running, params: dict[str, str], param: str) -> None:
    refused = get(server, q=params.get("q", ""), n=params.get("n", "24"))
    assert refused.status_code == 400
    assert error_of(refused)["param"] == param


def test_without_a_folder_and_with_another_model(server: Running, folder: Path) -> None:
    """The second server's model did not make the index."""
    with running(ScriptedBackend()) as plain:
        assert error_of(get(plain, q="x"))["code"] == "not_offered"
    with running(ScriptedBackend(), ServerSettings(search=folder)) as other:
        refused = get(other, q="x")
        assert refused.status_code == 404
        assert error_of(refused)["code"] == "model_not_found"
