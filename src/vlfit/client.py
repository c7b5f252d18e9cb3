"""The Python API: ``VLM`` runs a model in this process, ``Client`` talks to a server, with the same methods.

Cheap to import: torch is imported when a ``VLM`` is created, and never for a ``Client``.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Unpack

from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.outputs import Answer, ImageSeen
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Stream
from vlfit.errors import UsageError
from vlfit.tasks.describe import CaptionDetail, Chat, stream_ask, stream_caption
from vlfit.tasks.objects import Detection, Scene, detect, scene
from vlfit.tasks.sampling_options import SamplingOptions, with_options

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.plan.model_lookup import AutoChoice
    from vlfit.tasks.batch.job import Wish
    from vlfit.tasks.batch.runner import BatchProgress, Tally

Picture: TypeAlias = "str | Path | bytes | Image | ImagePart"
"""A path, an ``https:`` or ``data:`` URL, ``-`` for standard input, encoded bytes, or a PIL image."""

PictureOrVideo: TypeAlias = "Picture | VideoPart"
"""A picture, or the frames of a video."""

logger = logging.getLogger("vlfit")


class WordStream:
    """A streaming answer. Iterate over it for pieces of text, of whole characters.

    Leaving the loop early, or ``close``, cancels the request.

        with vlm.stream("What is this?", "photo.jpg") as words:
            for piece in words:
                print(piece, end="", flush=True)
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture; known once the first piece has arrived."""
        return self._stream.images

    def __iter__(self) -> Iterator[str]:
        finished = False
        try:
            for chunk in self._stream:
                finished = chunk.finish_reason is not None
                if chunk.text:
                    yield chunk.text
        finally:
            if not finished:
                self._stream.close()

    def answer(self) -> Answer:
        """Read to the end. Returns the whole answer, including what was read before, with its usage."""
        return self._stream.answer()

    def close(self) -> None:
        """Cancel the request."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChatSession:
    """A conversation with history, started by ``chat()``.

    chat = vlm.chat()
    chat.ask("What is this?", "photo.jpg")
    chat.ask("And what colour is it?")
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @property
    def history(self) -> Conversation:
        """All messages so far."""
        return self._chat.history

    def ask(self, text: str, *pictures: PictureOrVideo) -> Answer:
        """Send the next message, with ``pictures``."""
        return self._chat.ask(text, *map(_load, pictures))

    def stream(self, text: str, *pictures: PictureOrVideo) -> WordStream:
        """``ask`` as a stream. If it is closed early, the text so far stays in the history."""
        return WordStream(self._chat.stream(text, *map(_load, pictures)))

    def reset(self) -> None:
        """Clear the history, except the system message."""
        self._chat.reset()


class VisionModel:
    """Methods of ``VLM`` and ``Client``. They raise ``vlfit.VlfitError``s: see ``vlfit.errors``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._backend.model

    def caption(
        self, picture: Picture, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Describe ``picture`` in one sentence, or in detail with ``detail="long"``.

        print(vlm.caption("photo.jpg").text)
        """
        return self.stream_caption(picture, detail, **options).answer()

    def stream_caption(
        self, picture: Picture, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``caption`` as a stream."""
        sampling = with_options(SamplingParams(), options)
        return WordStream(stream_caption(self._backend, _load_picture(picture), detail, sampling))

    def ask(
        self, question: str, *pictures: PictureOrVideo, system: str = "", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Answer ``question`` about any number of ``pictures``.

        print(vlm.ask("Which of the two is larger?", "one.jpg", "two.jpg").text)
        """
        return self.stream(question, *pictures, system=system, **options).answer()

    def stream(
        self, question: str, *pictures: PictureOrVideo, system: str = "", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``ask`` as a stream."""
        sampling = with_options(SamplingParams(), options)
        parts = tuple(map(_load, pictures))
        return WordStream(stream_ask(self._backend, question, *parts, system=system, sampling=sampling))

    def scene(self, picture: Picture, **options: Unpack[SamplingOptions]) -> Scene:
        """A summary of ``picture``, its objects with boxes in pixels, and its visible text.

        for thing in vlm.scene("photo.jpg").objects:
            print(thing.label, thing.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = with_options(SamplingParams(), options)
        return scene(self._backend, _load_picture(picture), sampling)

    def detect(
        self, picture: Picture, things: str | Sequence[str], **options: Unpack[SamplingOptions]
    ) -> Detection:
        """Find ``things`` (``"cups"``, ``"cups, plates"``, ``["cups", "plates"]``), with boxes in pixels.

        for cup in vlm.detect("photo.jpg", "cups").objects:
            print(cup.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = with_options(SamplingParams(), options)
        names = things if isinstance(things, str) else ", ".join(things)
        return detect(self._backend, _load_picture(picture), names, sampling)

    def chat(self, *, system: str = "", **options: Unpack[SamplingOptions]) -> ChatSession:
        """Start a conversation. It samples as the checkpoint recommends, changed by ``options``."""
        sampling = with_options(self._backend.default_sampling(), options)
        return ChatSession(Chat(self._backend, system=system, sampling=sampling))

    def batch(
        self,
        sources: "str | Path | Sequence[str | Path]",
        output: str | Path,
        wish: "Wish | None" = None,
        *,
        at_once: int | None = None,
        limit: int | None = None,
        retry_failed: bool = False,
        progress: "BatchProgress | None" = None,
        **options: Unpack[SamplingOptions],
    ) -> "Tally":
        """Caption every picture of ``sources`` (folders, globs, lists, shards) into a file, or do what
        ``wish`` says. Called again, it continues where it stopped (docs/batch.md).

        tally = vlm.batch("photos/", "captions.jsonl")
        tally = vlm.batch("photos/", "cups.jsonl", Wish.detect("cups"))
        print(tally.done, tally.failed)
        """
        from vlfit.tasks.batch.job import Wish
        from vlfit.tasks.batch.runner import run_batch

        return run_batch(
            self._backend,
            [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)],
            Path(output),
            wish or Wish.caption(),
            with_options(SamplingParams(), options),
            at_once=at_once,
            limit=limit,
            retry_failed=retry_failed,
            progress=progress,
        )

    def close(self) -> None:
        """Free the memory, or close the connection. A ``with`` block does it at its end."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VLM(VisionModel):
    """A model in this process, loaded on creation.

        from vlfit import VLM

        with VLM("mini") as vlm:
            print(vlm.caption("photo.jpg").text)

    ``model``: ``auto`` (the best local checkpoint for this machine, else mini), ``mini`` (small, ships with
    vlfit), a folder, a hub id such as ``Qwen/Qwen3-VL-2B-Instruct-FP8``, or any other name that the commands
    take (``4B``, ``qwen3-vl:4b-fp8``; docs/models.md). What is not here is downloaded. ``backend``: see
    docs/backends.md; ``trust_remote_code``: let transformers run code that comes with the model; ``vllm``:
    where vLLM is and how it is started (``backends.vllm.serve_command``). ``progress`` is called with the
    current step and the fraction done. For the others see ``vlfit.api.engine_options.EngineOptions``.

    Raises ``CheckpointError``, ``HubError``, ``DeviceError``, ``DoesNotFit`` or ``UsageError``.
    """

    def __init__(
        self,
        model: str | Path = "auto",
        *,
        backend: Literal["native", "vllm", "transformers"] = "native",
        trust_remote_code: bool = False,
        vllm: "VllmOptions | None" = None,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        kv_dtype: str = "auto",
        speculate: bool = True,
        sequences: int = 4,
        image_tokens: int | None = None,
        offload: int | Literal["auto"] | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        options = EngineOptions(
            device=device,
            dtype=dtype,
            max_model_len=context,
            kv_dtype=kv_dtype,
            speculate=speculate,
            max_num_seqs=sequences,
            image_tokens=image_tokens,
            offload=offload,
        )
        if model == "auto":
            choice = choose_model(backend)
            # A warning, so that the fallback to mini is visible without logging set up.
            logger.log(logging.WARNING if choice.model == "mini" else logging.INFO, choice.reason)
            model = choice.model
        from vlfit.backends.opening import BackendSpec, open_backend

        if backend == "vllm":
            vllm = _with_doctor(vllm)
        spec = BackendSpec(
            kind=backend, model=model, options=options, trust_remote_code=trust_remote_code, vllm=vllm
        )
        super().__init__(open_backend(spec, progress))

    def sleep(self, park: SleepLevel = "auto") -> None:
        """Free the GPU's memory, after running requests end. The next request, or ``wake``, takes it again.

        ``park``: keep the weights in RAM (``ram``), reload them from their files (``files``), or RAM if there
        is enough (``auto``). Raises ``DoesNotFit`` and ``UsageError`` if that is not possible.
        """
        self._sleeper("sleep").sleep(park).result()

    def wake(self) -> None:
        """Take the GPU's memory again. Raises ``CannotWake`` if other programs hold it."""
        self._sleeper("wake").wake().result()

    def _sleeper(self, what: str) -> Backend:
        if not self._backend.capabilities.sleep:
            raise UsageError(f"this backend cannot {what}", 'Open the model with backend="native".')
        return self._backend


class Client(VisionModel):
    """A model on a server: ``vlfit serve``, or any server with OpenAI's API.

        from vlfit import Client

        with Client("http://127.0.0.1:8000") as client:
            print(client.caption("photo.jpg").text)

    Pictures are read locally and sent with the request. ``model`` is only needed for servers with several
    models. Raises ``ServerUnreachable`` or ``RemoteError``.
    """

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        from vlfit.backends.remote import RemoteBackend

        self._remote = RemoteBackend(url, api_key=api_key, model=model)
        super().__init__(self._remote)

    def sleep(self, park: SleepLevel = "auto") -> None:
        """Let a vlfit server free its GPU, after running requests end. The next request wakes it.

        ``park``: as for ``VLM.sleep``.
        """
        self._remote.sleep_server(park)

    def wake(self) -> None:
        """Wake a sleeping vlfit server. Raises ``CannotWake`` if other programs hold its memory."""
        self._remote.wake_server()


def choose_model(backend: str = "native") -> "AutoChoice":
    """The model that ``auto`` stands for on this machine, with the reason. Downloads nothing.

    Raises ``UsageError`` for ``transformers``, which needs a model by name.
    """
    if backend == "transformers":
        raise UsageError("--backend transformers needs a model by name", "Name a folder or a hub id.")
    from vlfit.checkpoint.source import local_models
    from vlfit.machine.survey import survey
    from vlfit.plan.model_lookup import choose_checkpoint

    return choose_checkpoint(survey(), local_models())


def _with_doctor(vllm: "VllmOptions | None") -> "VllmOptions":
    """``vllm`` with the doctor, which explains from vLLM's log why it failed."""
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.doctor.diagnose import read_failure

    options = vllm or VllmOptions()
    return options if options.diagnose_log else replace(options, diagnose_log=read_failure)


def _load(picture: PictureOrVideo) -> ImagePart | VideoPart:
    return picture if isinstance(picture, VideoPart) else _load_picture(picture)


def _load_picture(picture: Picture) -> ImagePart:
    if isinstance(picture, ImagePart):
        return picture
    from vlfit.tasks.pictures import load_picture

    return load_picture(picture)
