"""The Python API: ``VLM`` runs a model in this process, ``Client`` talks to a server, with the same methods.

Cheap to import: torch is imported when a ``VLM`` is created, and never for a ``Client``.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Unpack, cast

from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.outputs import Answer, ImageSeen
from vlfit.api.pooling import ModelKind
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Stream
from vlfit.errors import UsageError
from vlfit.tasks.describe import CaptionDetail, Chat, stream_ask, stream_caption
from vlfit.tasks.objects import Detection, Scene, detect, scene
from vlfit.tasks.sampling_options import SamplingOptions, apply_options

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.plan.model_choice import AutoChoice
    from vlfit.tasks.batch.job import Wish
    from vlfit.tasks.batch.runner import BatchProgress, Tally
    from vlfit.tasks.embeddings import EmbedInput
    from vlfit.tasks.files import FilePart, MediaFile

Picture: TypeAlias = "str | Path | bytes | Image | ImagePart"
"""A path, an ``https:`` or ``data:`` URL, ``-`` for standard input, encoded bytes, or a PIL image."""

PictureOrVideo: TypeAlias = "Picture | VideoPart | MediaFile"
"""A picture, the frames of a video, or what ``vlfit.tasks.files.load_file`` returns.

A path may also be that of a PDF (``report.pdf``, ``report.pdf#2-5``), a video or a camera RAW photo."""

EmbedItem: TypeAlias = "str | PictureOrVideo | tuple[str, PictureOrVideo]"
"""What one vector is of: text (any ``str``), a picture (of any other type), or a pair of text and picture.

In a pair the picture may also be a path or URL as ``str``."""

logger = logging.getLogger("vlfit")


class WordStream:
    """A streaming answer. Iterate over it, once, for pieces of text, of whole characters.

    Leaving the loop early, or ``close``, cancels the request. ``answer`` returns the whole answer, after the
    loop or in place of it.

        with vlm.stream("What is this?", "photo.jpg") as words:
            for piece in words:
                print(piece, end="", flush=True)
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.on_reasoning: Callable[[], None] | None = None
        """Called once, if the model reasons before it answers; the pieces are of the answer alone."""

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture. From a server, empty until the first piece arrives."""
        return self._stream.images

    def __iter__(self) -> Iterator[str]:
        finished = False
        try:
            for chunk in self._stream:
                finished = chunk.finish_reason is not None
                if chunk.reasoning and self.on_reasoning is not None:
                    self.on_reasoning()
                    self.on_reasoning = None
                if chunk.text:
                    yield chunk.text
        finally:
            if not finished:
                self._stream.close()

    def answer(self) -> Answer:
        """Read to the end and return the whole answer, including pieces that were read before."""
        return self._stream.answer()

    def close(self) -> None:
        """Cancel the request if it still runs."""
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
        """All messages so far, the system message first."""
        return self._chat.history

    def ask(self, text: str, *pictures: PictureOrVideo) -> Answer:
        """Send the next message, with ``pictures``, and wait for the answer.

        Both join the history; if it raises, neither does.
        """
        return self._chat.ask(text, *map(_load, pictures))

    def stream(self, text: str, *pictures: PictureOrVideo) -> WordStream:
        """``ask`` as a stream. If the stream is closed early, the history keeps the text so far, if any."""
        return WordStream(self._chat.stream(text, *map(_load, pictures)))

    def reset(self) -> None:
        """Clear the history, except the system message."""
        self._chat.reset()


class VisionModel:
    """Methods that ``VLM`` and ``Client`` share. They raise errors of ``vlfit.errors``.

    A context manager, which closes the model at its end. ``options`` of a method: sampling parameters such
    as ``temperature`` and ``max_tokens``, in place of the method's own (``tasks.sampling_options``).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._backend.model

    @property
    def context(self) -> int | None:
        """Most tokens of one request, prompt and answer; None if a server does not say."""
        return self._backend.context

    def caption(
        self, picture: PictureOrVideo, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Describe a picture or video in one sentence, or in detail with ``detail="long"``.

        print(vlm.caption("photo.jpg").text)
        """
        return self.stream_caption(picture, detail, **options).answer()

    def stream_caption(
        self, picture: PictureOrVideo, detail: CaptionDetail = "short", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``caption`` as a stream."""
        sampling = apply_options(SamplingParams(), options)
        part = _load(picture)
        if not _is_video(part):
            part = _load_picture(part)
        return WordStream(stream_caption(self._backend, part, detail, sampling))

    def ask(
        self, question: str, *pictures: PictureOrVideo, system: str = "", **options: Unpack[SamplingOptions]
    ) -> Answer:
        """Answer ``question`` about any number of ``pictures``, documents and videos; also about none.

        ``system``: a system message; empty: none.

        print(vlm.ask("Which of the two is larger?", "one.jpg", "two.jpg").text)
        """
        return self.stream(question, *pictures, system=system, **options).answer()

    def stream(
        self, question: str, *pictures: PictureOrVideo, system: str = "", **options: Unpack[SamplingOptions]
    ) -> WordStream:
        """``ask`` as a stream."""
        sampling = apply_options(SamplingParams(), options)
        parts = tuple(map(_load, pictures))
        return WordStream(stream_ask(self._backend, question, *parts, system=system, sampling=sampling))

    def scene(self, picture: PictureOrVideo, **options: Unpack[SamplingOptions]) -> Scene:
        """Summarize ``picture``, with its objects (boxes in pixels) and its visible text.

        for thing in vlm.scene("photo.jpg").objects:
            print(thing.label, thing.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = apply_options(SamplingParams(), options)
        return scene(self._backend, _load_picture(picture), sampling)

    def detect(
        self, picture: PictureOrVideo, things: str | Sequence[str], **options: Unpack[SamplingOptions]
    ) -> Detection:
        """Find ``things`` (``"cups"``, ``"cups, plates"``, ``["cups", "plates"]``), with boxes in pixels.

        for cup in vlm.detect("photo.jpg", "cups").objects:
            print(cup.box)

        Raises ``UnreadableAnswer`` when the model does not answer in the form that was asked for.
        """
        sampling = apply_options(SamplingParams(), options)
        names = things if isinstance(things, str) else ", ".join(things)
        return detect(self._backend, _load_picture(picture), names, sampling)

    @property
    def is_embedding_model(self) -> bool:
        """Whether the model was trained for vectors; those of a chat model are much worse for search."""
        pooling = self._backend.pooling
        return pooling is not None and pooling.kind == "embedding"

    @property
    def embedding_size(self) -> int:
        """Components of a whole vector. Raises ``UsageError`` if the model has none."""
        from vlfit.tasks.embeddings import check_embeds

        check_embeds(self._backend)
        if self._backend.pooling is None:
            raise UsageError(f"the size of vectors of {self.model!r} is not known", "Call embed once.")
        return self._backend.pooling.dimensions

    def embed(
        self,
        items: "EmbedItem | Sequence[EmbedItem]",
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        """Vectors of texts, pictures, or pairs of both: float32 [items, dimensions], each of length 1.

        ``items``: one, or several; a ``str`` is text, a ``Path`` a picture. ``instruction``: what the vectors
        are for; None: the model's own. ``dimensions``: keep only the first components, normalized again;
        None: all.

        photos = vlm.embed([Path("cat.jpg"), Path("dog.jpg")])
        query = vlm.embed("a sleeping cat", instruction=QUERY_INSTRUCTION)
        print(photos @ query[0])

        Raises the error of the first item that fails, and ``UsageError`` if the model or backend has no
        vectors.
        """
        import numpy as np

        from vlfit.tasks.embeddings import embed_all

        several = isinstance(items, Sequence) and not isinstance(items, str | bytes | tuple)
        each = cast("Sequence[EmbedItem]", items if several else [items])
        vectors = [
            embedding.vector
            for embedding in embed_all(
                self._backend, map(_embed_input, each), instruction=instruction, dimensions=dimensions
            )
        ]
        if not vectors:
            return np.zeros((0, dimensions or self.embedding_size), dtype=np.float32)
        stacked: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.stack(vectors)
        return stacked

    def rerank(
        self, query: "EmbedItem", documents: "Sequence[EmbedItem]", *, instruction: str | None = None
    ) -> list[float]:
        """How well each of ``documents`` answers ``query``: 0 to 1, in their order.

        ``instruction``: what counts as an answer; None: the model's own.

        scores = vlm.rerank("a sleeping cat", [Path("cat.jpg"), Path("dog.jpg"), "some text"])

        Raises the error of the first document that fails, and ``UsageError`` if the model does not score.
        """
        from vlfit.tasks.embeddings import rerank

        inputs = [_embed_input(each) for each in documents]
        return rerank(self._backend, _embed_input(query), inputs, instruction=instruction)

    def chat(self, *, system: str = "", **options: Unpack[SamplingOptions]) -> ChatSession:
        """Start a conversation with history. ``system``: its system message; empty: none.

        Answers are sampled as the checkpoint recommends, changed by ``options``.
        """
        sampling = apply_options(self._backend.default_sampling(), options)
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
        """Caption every picture of ``sources`` (folders, globs, lists, shards) into the file ``output``.

        A further call with the same ``output`` does what is missing (docs/batch.md). ``wish``: the task;
        None: a caption. ``at_once``: how many pictures are in progress at a time; None: chosen for the
        backend. ``limit``: the most pictures to process in this call; None: all. ``retry_failed``: also try
        pictures again that failed in an earlier call. ``progress``: its methods are called during the run.
        Returns the counts.

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
            apply_options(SamplingParams(), options),
            concurrency=at_once,
            limit=limit,
            retry_failed=retry_failed,
            progress=progress,
        )

    def close(self) -> None:
        """Free the model's memory, or close the connection. A ``with`` block calls it at its end."""
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
    take (``4B``, ``qwen3-vl:4b-fp8``; docs/models.md). Missing files are downloaded. ``mmproj``: GGUF file of
    the vision tower that belongs to a GGUF model; None: the one beside it that fits. ``backend``: see
    docs/backends.md; ``trust_remote_code``: let transformers run code that comes with the model; ``vllm``:
    where vLLM is and how it is started (``backends.vllm.serve_command``). ``progress``: called with the
    current step and the fraction done. ``context``: ``max_model_len`` of ``EngineOptions`` (in
    ``vlfit.api.engine_options``), ``sequences``: its ``max_num_seqs``; ``device``, ``dtype``, ``kv_dtype``,
    ``speculate``, ``image_tokens``, ``offload``, ``kernels``: as there.

    Raises ``CheckpointError``, ``HubError``, ``DeviceError``, ``DoesNotFit`` or ``UsageError``.
    """

    def __init__(
        self,
        model: str | Path = "auto",
        *,
        mmproj: str | Path | None = None,
        backend: Literal["native", "vllm", "transformers"] = "native",
        trust_remote_code: bool = False,
        vllm: "VllmOptions | None" = None,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        kv_dtype: str = "auto",
        speculate: bool | None = None,
        sequences: int = 4,
        image_tokens: int | None = None,
        offload: int | Literal["auto"] | None = None,
        kernels: str = "auto",
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
            kernels=kernels,
        )
        if model == "auto":
            choice = choose_model(backend, device=device)
            # A warning, so that the fallback to mini is visible without logging set up.
            logger.log(logging.WARNING if choice.model == "mini" else logging.INFO, choice.reason)
            model = choice.model
        if mmproj is not None:
            from vlfit.checkpoint.gguf.file_names import with_mmproj

            if not isinstance(mmproj, str | Path):
                raise UsageError(f"mmproj is {mmproj!r}, not a path", "Give the path of a GGUF file.")
            model = with_mmproj(str(model), mmproj)
        from vlfit.backends.opening import BackendSpec, open_backend

        if backend == "vllm":
            vllm = _with_doctor(vllm)
        spec = BackendSpec(
            kind=backend, model=model, options=options, trust_remote_code=trust_remote_code, vllm=vllm
        )
        super().__init__(open_backend(spec, progress))

    def sleep(self, park: SleepLevel = "auto") -> None:
        """Wait for running requests, then free the GPU memory. The next request, or ``wake``, takes it again.

        Returns when the model sleeps. ``park``: keep the weights in RAM (``ram``), read them from their files
        again when it wakes (``files``), or ``ram`` if there is enough, else ``files`` (``auto``). Raises
        ``DoesNotFit`` if the RAM is too small, ``UsageError`` if the backend or model cannot sleep so.
        """
        self._sleeper("sleep").sleep(park).result()

    def wake(self) -> None:
        """Take the GPU memory again and load the weights. Raises ``CannotWake`` if other programs hold it."""
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

    The constructor asks the server for its models. Pictures are read locally and sent with the request.
    ``api_key``: None: none is sent. ``model``: only needed for servers with several models; None: the
    first. Raises ``ServerUnreachable``, ``RemoteError`` or ``WrongApiKey``.
    """

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        from vlfit.backends.remote import RemoteBackend

        self._remote = RemoteBackend(url, api_key=api_key, model=model)
        super().__init__(self._remote)

    def sleep(self, park: SleepLevel = "auto") -> None:
        """Let a vlfit server free its GPU memory once running requests end. The next request wakes it.

        Returns when the server sleeps. ``park``: as for ``VLM.sleep``.
        """
        self._remote.sleep_server(park)

    def wake(self) -> None:
        """Wake a sleeping vlfit server, and wait until it is awake.

        Raises ``CannotWake`` if other programs hold the GPU memory that it needs.
        """
        self._remote.wake_server()


def choose_model(
    backend: str = "native", kind: ModelKind = "chat", *, device: str | None = None
) -> "AutoChoice":
    """Choose the local model that ``auto`` stands for on this machine, with the reason. Downloads nothing.

    For ``native`` also GGUF models in the folders of Ollama, LM Studio, llama.cpp and the hub count.
    ``kind``: what it is to be made for. ``device``: ``cpu`` to choose for the processor, whatever cards there
    are. Raises ``UsageError`` if ``backend`` is ``transformers``, which needs a model by name.
    """
    if backend == "transformers":
        raise UsageError("--backend transformers needs a model by name", "Name a folder or a hub id.")
    from vlfit.checkpoint.source import local_models
    from vlfit.plan.gguf_shelf import Shelf, read_shelf
    from vlfit.plan.model_choice import choose_checkpoint
    from vlfit.plan.processors import this_computer

    machine = this_computer(device)
    shelf = read_shelf(machine) if backend == "native" else Shelf()  # vLLM reads no GGUF of a vision model
    choice = choose_checkpoint(machine, local_models(), kind, shelf.models)
    if not shelf.left:
        return choice
    left = f"{shelf.left} GGUF models were not looked at, which would take longer: name one with --model"
    return replace(choice, reason=f"{choice.reason}; {left}")


def _with_doctor(vllm: "VllmOptions | None") -> "VllmOptions":
    """``vllm`` with the doctor, which explains from vLLM's log why it failed."""
    from vlfit.backends.vllm.serve_command import VllmOptions
    from vlfit.doctor.diagnose import find_failure

    options = vllm or VllmOptions()
    return options if options.diagnose_log else replace(options, diagnose_log=find_failure)


def _load(picture: PictureOrVideo) -> "FilePart":
    from vlfit.tasks.files import MediaFile, load_file

    return picture if isinstance(picture, MediaFile) else load_file(picture)


def _embed_input(item: "EmbedItem") -> "EmbedInput":
    from vlfit.tasks.embeddings import EmbedInput

    if isinstance(item, str):
        return EmbedInput(item)
    if isinstance(item, tuple):
        if len(item) != 2 or not isinstance(item[0], str):
            raise UsageError("a tuple to embed is not a text and a picture", 'Use ("text", picture).')
        return EmbedInput(item[0], (_load(item[1]),))
    return EmbedInput("", (_load(item),))


def _is_video(part: "FilePart") -> bool:
    return isinstance(part, VideoPart) or (not isinstance(part, ImagePart) and part.kind == "video")


def _load_picture(picture: PictureOrVideo) -> ImagePart:
    """A single picture, also the only page of a PDF. Raises ``UsageError`` for more."""
    from vlfit.tasks.files import single_picture

    return single_picture(_load(picture))
