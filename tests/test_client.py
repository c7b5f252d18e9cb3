"""The Python API with a tiny model, in this process and through a server."""

import http.server
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image

from tests.pictures import picture
from tests.scripted_backend import ScriptedBackend, png
from tests.server.harness import running
from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.client import VLM, Client, Picture, VisionModel
from vlfit.errors import (
    InvalidRequest,
    NotACheckpoint,
    PictureNotFound,
    ServerUnreachable,
    UnreadableAnswer,
    UsageError,
)
from vlfit.tasks.sampling_options import SamplingOptions

PHOTO = picture(96, 64)


@pytest.fixture(scope="module")
def vlm(tiny: Callable[[str], Path]) -> Iterator[VLM]:
    import torch

    torch.set_num_threads(1)
    with VLM(tiny("tied"), device="cpu", context=1024, sequences=2) as model:
        yield model


@pytest.fixture(scope="module")
def client(tiny: Callable[[str], Path]) -> Iterator[Client]:
    with (
        NativeBackend.load(
            tiny("tied"), EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=2)
        ) as backend,
        running(backend) as server,
        Client(server.url) as connected,
    ):
        yield connected


@pytest.fixture(params=["VLM", "Client"])
def either(request: pytest.FixtureRequest) -> VisionModel:
    """Both ways to a model: everything that uses this must hold for both."""
    model: VisionModel = request.getfixturevalue("vlm" if request.param == "VLM" else "client")
    return model


def test_caption_tells_what_was_seen_and_what_it_cost(either: VisionModel) -> None:
    answer = either.caption(PHOTO, max_tokens=12, ignore_eos=True)
    assert answer.text
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert [(seen.width, seen.height) for seen in answer.images] == [(96, 64)]
    assert answer.images[0].tokens == (answer.usage.image_tokens or 0) > 0
    assert answer.timings is not None
    assert answer.timings.total_s > 0
    assert str(answer) == answer.text
    assert answer.model == either.model


def test_both_say_the_same(vlm: VLM, client: Client) -> None:
    for detail in ("short", "long"):
        here = vlm.caption(PHOTO, detail, max_tokens=30)
        there = client.caption(PHOTO, detail, max_tokens=30)
        assert (here.text, here.usage, here.images) == (there.text, there.usage, there.images)


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "pil", "part", "data url"])
def test_every_way_to_name_a_picture_gives_the_same(kind: str, vlm: VLM, tmp_path: Path) -> None:
    import base64

    path = tmp_path / "photo.png"
    path.write_bytes(PHOTO)
    ways: dict[str, Picture] = {
        "path": path,
        "text": str(path),
        "bytes": PHOTO,
        "pil": Image.open(io.BytesIO(PHOTO)),
        "part": ImagePart(PHOTO),
        "data url": "data:image/png;base64," + base64.b64encode(PHOTO).decode(),
    }
    expected = vlm.caption(PHOTO, max_tokens=8).text
    assert vlm.caption(ways[kind], max_tokens=8).text == expected


def test_a_picture_from_a_url(vlm: VLM) -> None:
    class Photo(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(PHOTO)))
            self.end_headers()
            self.wfile.write(PHOTO)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Photo) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/photo.png"
        answer = vlm.caption(url, max_tokens=8)
        server.shutdown()
        thread.join()
    assert answer.text == vlm.caption(PHOTO, max_tokens=8).text


def test_ask_about_none_one_several_and_a_clip(either: VisionModel) -> None:
    assert either.ask("Hello", max_tokens=4).images == ()
    assert len(either.ask("What?", PHOTO, max_tokens=4).images) == 1
    assert len(either.ask("Which?", PHOTO, png(64, 64), max_tokens=4).images) == 2
    assert len(either.ask("What happens?", VideoPart((PHOTO, PHOTO)), max_tokens=4).images) == 1


def test_a_stream_gives_the_pieces_of_the_answer(either: VisionModel) -> None:
    with either.stream("What is this?", PHOTO, max_tokens=12, ignore_eos=True) as words:
        pieces = list(words)
        assert len(pieces) > 1
        assert all(pieces)
        assert words.answer().text == "".join(pieces)
        assert words.images == words.answer().images
    assert "".join(either.stream_caption(PHOTO, max_tokens=12)) == either.caption(PHOTO, max_tokens=12).text


def test_leaving_a_stream_early_ends_the_request(either: VisionModel) -> None:
    words = either.stream("What is this?", PHOTO, max_tokens=500, ignore_eos=True)
    for _ in words:
        break
    with pytest.raises(UsageError):
        words.answer()
    assert either.ask("Hello", max_tokens=2).text  # the next request works


def test_a_chat_remembers(either: VisionModel) -> None:
    chat = either.chat(system="Be brief.", temperature=0, max_tokens=6)
    first = chat.ask("What is this?", PHOTO)
    second = "".join(chat.stream("And now?"))
    assert [message.role for message in chat.history] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.history[2].parts[0].text == first.text  # type: ignore[union-attr]
    assert chat.history[4].parts[0].text == second  # type: ignore[union-attr]
    longer = chat.ask("More?").usage.prompt_tokens
    assert longer > first.usage.prompt_tokens
    chat.reset()
    assert len(chat.history) == 1


def test_a_chat_samples_as_the_checkpoint_says_with_options_on_top() -> None:
    backend = ScriptedBackend(["Hello.", "Hello."])
    VisionModel(backend).chat().ask("Hi")
    VisionModel(backend).chat(top_p=0.5).ask("Hi")
    assert backend.asked[0][1] == backend.default_sampling()
    assert (backend.asked[1][1].temperature, backend.asked[1][1].top_p) == (0.7, 0.5)


def test_a_scene_in_prose_is_a_clear_error() -> None:
    """As a server may answer, which is not held to the form."""
    with pytest.raises(UnreadableAnswer) as caught:
        VisionModel(ScriptedBackend(["A red square."])).scene(PHOTO)
    assert caught.value.answer == "A red square."


def test_sampling_options_are_those_of_sampling_params() -> None:
    """All but the form, which tasks ask for, and the variables of a chat template, which servers take."""
    names = {field.name for field in fields(SamplingParams)} - {"grammar", "template_variables"}
    assert set(SamplingOptions.__annotations__) == names


def test_sampling_options_reach_the_backend() -> None:
    backend = ScriptedBackend(["x"] * 3)
    model = VisionModel(backend)
    model.ask("Hi", stop="END", stop_token_ids=[5], seed=3, temperature=1.0)
    model.caption(png(), stop=["a", "b"])
    assert backend.asked[0][1] == SamplingParams(stop=("END",), stop_token_ids=(5,), seed=3, temperature=1.0)
    assert backend.asked[1][1] == SamplingParams(stop=("a", "b"))


def test_bad_values_are_refused_before_anything_runs(either: VisionModel) -> None:
    with pytest.raises(InvalidRequest) as caught:
        either.caption(PHOTO, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(PictureNotFound):
        either.caption("nowhere.png")
    with pytest.raises(InvalidRequest):
        either.ask("")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        VLM(tmp_path)
    with pytest.raises(UsageError):
        VLM(tmp_path, context=-1)
    with pytest.raises(UsageError):
        VLM("mini", mmproj=5)  # type: ignore[arg-type]
    with pytest.raises(ServerUnreachable):
        Client("http://127.0.0.1:9")


def test_loading_tells_its_progress(tiny: Callable[[str], Path]) -> None:
    told: list[tuple[str, float]] = []
    with VLM(tiny("tied"), device="cpu", progress=lambda what, share: told.append((what, share))):
        pass
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(what for what, _ in told)


def test_auto_falls_back_to_mini_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", list)  # whoever tests may have real ones
    with caplog.at_level(logging.INFO, logger="vlfit"), VLM(device="cpu") as model:
        assert model.model == "mini"
        assert model.caption(PHOTO, max_tokens=20).text
    (record,) = [record for record in caplog.records if record.name == "vlfit"]
    assert record.levelno == logging.WARNING
    assert "vlfit pull" in record.getMessage()


def test_closing_closes_the_backend() -> None:
    backend = ScriptedBackend([])
    with VisionModel(backend):
        pass
    assert backend.closed


def test_a_client_never_imports_torch() -> None:
    code = "import sys, vlfit; vlfit.Client; vlfit.VLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
