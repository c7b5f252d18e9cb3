"""What the MCP tools do, without the protocol: blocking calls that return JSON and raise vlfit's errors."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from vlfit.api.outputs import Answer
from vlfit.client import VisionModel
from vlfit.errors import InvalidRequest, UsageError
from vlfit.images.limits import CLIENT_PICTURES, use_limits
from vlfit.images.media_kinds import MEDIA_EXTENSIONS, is_installed
from vlfit.server.mcp.allowed_files import AllowedFiles
from vlfit.tasks.describe import CaptionDetail

if TYPE_CHECKING:
    from vlfit.tasks.search.indexing import Embedder

MAX_PICTURES = 8  # of one question
MAX_TEXT = 20_000  # characters of a question
MAX_TOKENS = 1_024  # of an answer: agents pay for each
SMALL_CONTEXT = 4 * MAX_TOKENS  # in which room for such an answer would be missing for pictures
READ_TEXT = (
    "Write down all text that is in this picture, exactly as it is written, line by line. "
    "Write nothing else. If there is no text, write: no text"
)
COMPARE = "Compare these pictures: what do they have in common, and what differs?"


class PictureTools:
    """The tools, with models that are opened at first use. Any thread may call them.

    ``files``: what may be read. ``open_embedder``: gets the name of the model that made an index, and the
    name it was opened as (None: it ran on a server).
    """

    def __init__(
        self,
        files: AllowedFiles,
        open_model: Callable[[], VisionModel],
        open_embedder: "Callable[[str, str | None], Embedder]",
    ) -> None:
        self._files = files
        self._open_model = open_model
        self._open_embedder = open_embedder
        self._model: VisionModel | None = None
        self._embedders: dict[str, Embedder] = {}
        self._opening = threading.Lock()
        media = tuple(kind for kind in MEDIA_EXTENSIONS if is_installed(kind))
        self._limits = replace(CLIENT_PICTURES, media=media)

    def describe(self, picture: str, detail: CaptionDetail = "short") -> dict[str, Any]:
        """A caption of one sentence, or with ``detail`` ``long`` of several."""
        with use_limits(self._limits):
            part = self._files.load(picture)
            return _text(self._opened().caption(part, detail, max_tokens=self._max_tokens))

    def ask(self, question: str, pictures: Sequence[str] = ()) -> dict[str, Any]:
        """An answer to ``question`` about ``pictures``, at most ``MAX_PICTURES``."""
        if not question.strip() or len(question) > MAX_TEXT:
            raise InvalidRequest(
                f"the question has {len(question):,} characters",
                f"Send 1 to {MAX_TEXT:,}.",
                param="question",
            )
        if len(pictures) > MAX_PICTURES:
            raise InvalidRequest(
                f"{len(pictures)} pictures are too many", f"Send at most {MAX_PICTURES}.", param="pictures"
            )
        with use_limits(self._limits):
            parts = [self._files.load(each) for each in pictures]
            return _text(self._opened().ask(question, *parts, max_tokens=self._max_tokens))

    def compare(self, pictures: Sequence[str], question: str = COMPARE) -> dict[str, Any]:
        """An answer about two or more pictures."""
        if len(pictures) < 2:
            raise InvalidRequest(
                f"{len(pictures)} pictures are too few to compare", "Send two or more.", param="pictures"
            )
        return self.ask(question, pictures)

    def read_text(self, picture: str) -> dict[str, Any]:
        """The text that is in a picture or a document."""
        return self.ask(READ_TEXT, [picture])

    def detect(self, picture: str, things: str) -> dict[str, Any]:
        """Boxes of ``things``, in pixels: left, top, right, bottom."""
        if not things.strip() or len(things) > MAX_TEXT:
            raise InvalidRequest("things are empty or too long", "Name them: cups, plates.", param="things")
        with use_limits(self._limits):
            found = self._opened().detect(self._files.load(picture), things, max_tokens=self._max_tokens)
            return {
                "width": found.width,
                "height": found.height,
                "objects": [asdict(each) for each in found.objects],
            }

    def search(
        self, query: str = "", folder: str | None = None, like: str | None = None, n: int = 10
    ) -> dict[str, Any]:
        """Pictures of a folder that was indexed (``vlfit search FOLDER``), most alike first."""
        from vlfit.tasks.search.searching import Query, find, known_vector
        from vlfit.tasks.search.vector_index import VectorIndex, index_path

        if not 1 <= n <= 100:
            raise InvalidRequest(f"n is {n}", "It must be 1 to 100.", param="n")
        with use_limits(self._limits):
            root = self._files.folder(folder)
            wanted = Query(query, None if like is None else self._files.load(like))
            with VectorIndex(index_path(root), root, create=False) as index:
                if index.model is None:
                    raise UsageError(f"the index of {root} is empty", f"Make it: vlfit search {root}")
                known = known_vector(index, wanted)
                if known is not None:
                    hits = index.nearest(known, n)
                else:
                    embedder = self._embedder(index.model.name, index.opened_as)
                    hits = find(index, embedder, wanted, n)
        return {
            "results": [{"path": str(root / hit.path), "key": hit.key, "score": hit.score} for hit in hits]
        }

    def close(self) -> None:
        """Free the model's memory."""
        with self._opening:
            if self._model is not None:
                self._model.close()

    def _opened(self) -> VisionModel:
        with self._opening:
            if self._model is None:
                self._model = self._open_model()
            return self._model

    @property
    def _max_tokens(self) -> int | None:
        """The limit of an answer; None in a small context: the answer may take what the prompt leaves."""
        context = self._opened().context
        return None if context is not None and context < SMALL_CONTEXT else MAX_TOKENS

    def _embedder(self, name: str, opened_as: str | None) -> "Embedder":
        with self._opening:
            if name not in self._embedders:
                self._embedders[name] = self._open_embedder(name, opened_as)
            return self._embedders[name]


def _text(answer: Answer) -> dict[str, Any]:
    notes = [note for image in answer.images for note in image.notes]
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "model": answer.model,
        **({"notes": notes} if notes else {}),
    }
