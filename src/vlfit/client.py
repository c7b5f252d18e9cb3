"""The Python API: ``VLM`` runs a model in this process, ``Client`` speaks to a server; both do the same.

Knows how to turn what people have (paths, URLs, bytes, PIL images) into requests, not how a model runs.
Cheap to import: torch comes when a ``VLM`` is built, and never for a ``Client``.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Unpack, cast

from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.api.engine_options import EngineOptions, Park
from vlfit.api.outputs import Answer, ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Sleeper, Stream
from vlfit.errors import UsageError
from vlfit.tasks.describe import CaptionDetail, Chat, stream_ask, stream_caption
from vlfit.tasks.objects import Detection, Scene, detect, scene
from vlfit.tasks.sampling_options import SamplingOptions, with_options

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlfit.backends.base import LocalBackend
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.plan.subjects import Choice
    from vlfit.tasks.batch.job import Wish
    from vlfit.tasks.batch.runner import Progress as BatchProgress
    from vlfit.tasks.batch.runner import Tally


Picture: TypeAlias = "str | Path | bytes | Image | ImagePart"
"""A path, an ``https:`` or ``data:`` URL, ``-`` for standard input, encoded bytes, or a PIL image."""

PictureOrClip: TypeAlias = "Picture | VideoPart"
"""A picture, or frames that follow each other."""

Progress = Callable[[str, float], None]

logger = logging.getLogger("vlfit")


class WordStream:
    """An answer while it is being said: iterate for pieces of text, whole characters each.

    Leaving the loop early, or ``close``, ends the request and frees what it holds.

        with vlm.stream("What is this?", "photo.jpg") as words:
            for piece in words:
                print(piece, end="", flush=True)
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture; known once the first piece has come."""
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
        """Read on to the end, and give all of it with its cost, what was read before included."""
        return self._stream.answer()

    def close(self) -> None:
        """End the request now."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChatSession:
    """A conversation that goes on; ``VisionModel.chat`` starts one.

    chat = vlm.chat()
    chat.ask("What is this?", "photo.jpg")
    chat.ask("And what colour is it?")
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @property
    def history(self) -> Conversation:
        """Every message so far."""
        return self._chat.history

    def ask(self, text: str, *pictures: PictureOrClip) -> Answer:
        """Say ``text`` about ``pictures`` and all that went before."""
        return self._chat.ask(text, *map(_load, pictures))

    def stream(self, text: str, *pictures: PictureOrClip) -> WordStream:
        """``ask`` while it is being answered. A stream closed early leaves what was said in the history."""
        return WordStream(self._chat.stream(text, *map(_load, pictures)))

    def reset(self) -> None:
        """Forget everything said so far, except the system message."""
        self._chat.reset()


class VisionModel:
    """What ``VLM`` and ``Client`` have in common. Raises ``vlfit.VlfitError``s: see ``vlfit.errors``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        return self._backend.model

    def caption(
        self, picture: Picture, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Say what ``picture`` shows, in one sentence, or in as many as it takes with ``detail="long"``.

        print(vlm.caption("photo.jpg").text)
        """
        return self.stream_caption(picture, detail, **options).answer()

    def stream_caption(
        self, picture: Picture, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``caption`` while it is being said."""
        sampling = with_options(SamplingParams(), options)
        return WordStream(stream_caption(self._backend, _load_picture(picture), detail, sampling))

    def ask(
        self, question: str, *pictures: PictureOrClip, system: str = "", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Answer ``question`` about ``pictures``, or about none.

        print(vlm.ask("Which of the two is larger?", "one.jpg", "two.jpg").text)
        """
        return self.stream(question, *pictures, system=system, **options).answer()

    def stream(
        self, question: str, *pictures: PictureOrClip, system: str = "", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``ask`` while it is being answered."""
        sampling = with_options(SamplingParams(), options)
        parts = tuple(map(_load, pictures))
        return WordStream(stream_ask(self._backend, question, *parts, system=system, sampling=sampling))

    def scene(self, picture: Picture, **options: Unpack[SamplingOptions]) -> Scene:
        """Take ``picture`` apart: a summary, objects with boxes in its own pixels, the words on it.

        for thing in vlm.scene("photo.jpg").objects:
            print(thing.label, thing.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = with_options(SamplingParams(), options)
        return scene(self._backend, _load_picture(picture), sampling)

    def detect(
        self, picture: Picture, things: str | Sequence[str], **options: Unpack[SamplingOptions]
    ) -> Detection:
        """Find ``things`` (``"cups"``, ``"cups, plates"``, ``["cups", "plates"]``) in ``picture``, with boxes
        in its own pixels.

        for cup in vlm.detect("photo.jpg", "cups").objects:
            print(cup.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = with_options(SamplingParams(), options)
        wanted = things if isinstance(things, str) else ", ".join(things)
        return detect(self._backend, _load_picture(picture), wanted, sampling)

    def chat(self, *, system: str = "", **options: Unpack[SamplingOptions]) -> ChatSession:
        """Start a conversation with memory; sampled by the checkpoint's own settings, ``options`` on top."""
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
        """Caption every picture of ``sources`` (folders, globs, lists, shards) into a file ``output``, or do
        what ``wish`` says; called again it goes on where it was (docs/batch.md).

        tally = vlm.batch("photos/", "captions.jsonl")
        tally = vlm.batch("photos/", "cups.jsonl", Wish.detect("cups"))
        print(tally.done, tally.failed)
        """
        from vlfit.tasks.batch.job import Wish
        from vlfit.tasks.batch.runner import run_batch

        return run_batch(
            cast("LocalBackend", self._backend),
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
        """Give back what is held: memory, or the connection. A ``with`` block does it by itself."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VLM(VisionModel):
    """A model in this process, loaded when it is built.

        from vlfit import VLM

        with VLM("mini") as vlm:
            print(vlm.caption("photo.jpg").text)

    ``model``: ``auto`` (the best checkpoint that is already here for this machine, else mini), ``mini``
    (small, ships with vlfit), a folder, or a hub id such as ``Qwen/Qwen3-VL-2B-Instruct-FP8``. ``backend``:
    who runs it (docs/backends.md); ``trust_remote_code``: transformers may run the code that comes with it;
    ``vllm``: where vLLM is, and how it is started (``backends.vllm.serve_command``).
    The rest is described at ``vlfit.api.engine_options.EngineOptions``. ``progress`` gets what is being done
    and the share done.

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
        progress: Progress | None = None,
    ) -> None:
        options = EngineOptions(
            device=device,
            dtype=dtype,
            context=context,
            kv_dtype=kv_dtype,
            speculate=speculate,
            sequences=sequences,
            image_tokens=image_tokens,
            offload=offload,
        )
        if model == "auto":
            choice = choose_model(backend)
            # Falling back to the small model is worth hearing without having set up logging.
            logger.log(logging.WARNING if choice.model == "mini" else logging.INFO, choice.reason)
            model = choice.model
        from vlfit.backends.opening import Wanted, open_backend

        if backend == "vllm":
            vllm = _with_doctor(vllm)
        wanted = Wanted(
            kind=backend, model=model, options=options, trust_remote_code=trust_remote_code, vllm=vllm
        )
        super().__init__(open_backend(wanted, progress))

    def sleep(self, park: Park = "auto") -> None:
        """Give the GPU back: weights wait in RAM (``ram``), in their files (``files``, to be read again), or
        in RAM if there is enough (``auto``). What runs goes first; the next request, or ``wake``, takes the
        memory again. Raises ``DoesNotFit`` and ``UsageError`` where ``park`` cannot be had.
        """
        self._sleeper("sleep").sleep(park).result()

    def wake(self) -> None:
        """Take the memory again before a request does. Raises ``CannotWake`` if others have it."""
        self._sleeper("wake").wake().result()

    def _sleeper(self, what: str) -> Sleeper:
        if not isinstance(self._backend, Sleeper):
            raise UsageError(f"this backend cannot {what}", 'only backend="native" can')
        return self._backend


class Client(VisionModel):
    """A model behind a URL: ``vlfit serve``, or any server that speaks OpenAI's API.

        from vlfit import Client

        with Client("http://127.0.0.1:8000") as client:
            print(client.caption("photo.jpg").text)

    Pictures are read here and sent along, so paths are paths of this computer. ``model`` is needed only for
    servers with several. Raises ``ServerUnreachable`` or ``RemoteError``.
    """

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        from vlfit.backends.remote import RemoteBackend

        self._remote = RemoteBackend(url, api_key=api_key, model=model)
        super().__init__(self._remote)

    def sleep(self, park: Park = "auto") -> None:
        """Let a vlfit server give its GPU back, once what runs there is over. The next request wakes it.
        ``park``: where weights wait, as for ``VLM.sleep``.
        """
        self._remote.sleep(park)

    def wake(self) -> None:
        """Let a vlfit server that sleeps take its memory again. Raises ``CannotWake`` if others have it."""
        self._remote.wake()


def choose_model(backend: str = "native") -> "Choice":
    """What ``auto`` means on this machine now, with the reason in one sentence. Downloads nothing.

    Raises ``UsageError`` for ``transformers``, which is for the models that vlfit's own choice does not know.
    """
    if backend == "transformers":
        raise UsageError("--backend transformers needs a model by name", "name a folder or a hub id")
    from vlfit.checkpoint.source import local_models
    from vlfit.machine.survey import survey
    from vlfit.plan.subjects import choose_checkpoint

    return choose_checkpoint(survey(), local_models())


def _with_doctor(vllm: "VllmOptions | None") -> "VllmOptions":
    """With the doctor, who knows from its log why a vLLM has failed."""
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.doctor.diagnose import read_failure

    wanted = vllm or VllmOptions()
    return wanted if wanted.read_failure else replace(wanted, read_failure=read_failure)


def _load(picture: PictureOrClip) -> ImagePart | VideoPart:
    return picture if isinstance(picture, VideoPart) else _load_picture(picture)


def _load_picture(picture: Picture) -> ImagePart:
    if isinstance(picture, ImagePart):
        return picture
    from vlfit.tasks.pictures import load_picture

    return load_picture(picture)
