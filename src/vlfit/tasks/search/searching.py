"""Find the pictures of an index that a text, or another picture, is most alike."""

from dataclasses import dataclass

from vlfit.api.conversation import ImagePart
from vlfit.api.pooling import QUERY_INSTRUCTION, Vector
from vlfit.backends.base import Backend
from vlfit.errors import UsageError
from vlfit.tasks.batch.items import digest_of
from vlfit.tasks.embeddings import check_embeds, embed_parts
from vlfit.tasks.files import FilePart
from vlfit.tasks.search.indexing import Embedder
from vlfit.tasks.search.vector_index import Hit, IndexModel, VectorIndex

MAX_RESULTS = 1_000
MAX_QUERY = 2_000  # characters


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for: ``text``, the picture ``like``, or both in one vector. Raises ``UsageError`` for
    neither, and for a text that is too long.
    """

    text: str = ""
    like: FilePart | None = None

    def __post_init__(self) -> None:
        if not self.text.strip() and self.like is None:
            raise UsageError("nothing to search for", 'Say what: "red bicycle at the beach".', param="query")
        if len(self.text) > MAX_QUERY:
            raise UsageError(
                f"the query has {len(self.text):,} characters",
                f"Use at most {MAX_QUERY:,}: a sentence finds more than a page.",
                param="query",
            )


class BackendEmbedder:
    """An ``Embedder`` of a backend. Raises ``UsageError`` if ``backend`` gives no vectors."""

    def __init__(self, backend: Backend) -> None:
        check_embeds(backend)
        self._backend = backend
        self.model = backend.model
        # A server's model may not say; the vector of a word does.
        pooling = backend.pooling
        self.dimensions = pooling.dimensions if pooling is not None else len(self.embed("a"))

    def embed(self, text: str, *files: FilePart, instruction: str | None = None) -> Vector:
        """The vector of ``text`` and ``files`` together. Raises as ``embed_parts``."""
        return embed_parts(self._backend, text, *files, instruction=instruction).vector


def known_vector(index: VectorIndex, query: Query) -> Vector | None:
    """The vector of ``query`` if it is a picture that the index has, which takes no model; else None."""
    if query.text.strip() or not isinstance(query.like, ImagePart):
        return None
    return index.vector_of(digest_of(query.like))


def query_vector(embedder: Embedder, query: Query) -> Vector:
    """The vector of ``query``. Raises as ``Embedder.embed``."""
    files = () if query.like is None else (query.like,)
    text = query.text.strip()
    # Pictures are compared with pictures as they were indexed; words have an instruction of their own.
    return embedder.embed(text, *files, instruction=QUERY_INSTRUCTION if text else None)


def find(index: VectorIndex, embedder: Embedder, query: Query, n: int) -> list[Hit]:
    """The ``n`` pictures that ``query`` is most alike, best first.

    Raises ``WrongIndex`` if the index was made by another model, else as ``Embedder.embed``.
    """
    if index.model is None:
        return []
    index.use_model(IndexModel(embedder.model, embedder.dimensions))
    return index.nearest(query_vector(embedder, query), n)
