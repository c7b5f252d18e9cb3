"""Reranking in the form of Jina's, Cohere's and vLLM's APIs: the same routes, so one reply with the fields of
all. docs/embeddings.md has what differs.
"""

from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

from vlfit.api.conversation import Part
from vlfit.backends.base import Backend, Prepared
from vlfit.server.chat.preparation import file_urls
from vlfit.server.dialect import ApiPath, Dialect
from vlfit.server.embeddings.pooled_endpoint import (
    PooledEndpoint,
    PooledResults,
    as_chat,
    item_in_errors,
)
from vlfit.server.error_replies import ErrorFacts
from vlfit.server.generation import ServerContext
from vlfit.server.http.admission import Slots
from vlfit.server.rerank.rerank_schema import RerankRequest, read_rerank_request
from vlfit.tasks.embeddings import check_scores, prepare_score

COHERE_V2 = "/v2/rerank"
ROUTES = ("/v1/rerank", "/rerank", COHERE_V2)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["message", "detail", "code", "param"],
    "properties": {
        "message": {"type": "string", "description": "as in Cohere's API"},
        "detail": {"type": "string", "description": "the same, as in Jina's API"},
        "code": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "the invalid field"},
    },
}
PATHS = tuple(
    ApiPath(
        path,
        "post",
        "Rerank",
        "Scores of documents, texts or pictures, for a query.",
        "The documents by falling score. The extra field vlfit says what kind of model it was.",
        RerankRequest,
    )
    for path in ROUTES
)


def error_form(facts: ErrorFacts) -> dict[str, Any]:
    """An error's response: ``message`` as in Cohere's API, ``detail`` as in Jina's."""
    return {
        "message": facts.message,
        "detail": facts.message,
        "code": facts.code,
        "param": facts.param,
    }


class RerankEndpoint(PooledEndpoint[RerankRequest]):
    """A route that scores documents.

    ``returns_documents``: whether the reply has the documents if a request does not say.
    """

    bare_files = True
    model_kind = "reranker"

    def __init__(self, context: ServerContext, *, returns_documents: bool) -> None:
        super().__init__(context)
        self._returns_documents = returns_documents

    def parse(self, body: bytes | bytearray) -> RerankRequest:
        """Parse the body (``read_rerank_request``). Raises ``InvalidRequest``."""
        return read_rerank_request(body)

    def file_urls(self, params: RerankRequest) -> list[str]:
        """URLs of the request's pictures and files. Raises ``InvalidRequest`` for an invalid part."""
        return file_urls(as_chat(params.items()))

    def num_inputs(self, params: RerankRequest) -> int:
        """The number of documents: a prompt is scored for each."""
        return len(params.documents)

    def check(self, params: RerankRequest, backend: Backend) -> None:
        """Raise ``UsageError`` if the model does not score."""
        check_scores(backend)

    async def prepare(self, params: RerankRequest, sampling: object, slots: Slots) -> Sequence[Prepared]:
        """Fetch the pictures, then decode them and tokenize a prompt for each document in a thread."""

        def run(backend: Backend, sides: Sequence[tuple[Part, ...]]) -> list[Prepared]:
            query, *documents = sides
            prepared = []
            for index, document in enumerate(documents):
                with item_in_errors(params.place(index + 1)):
                    prepared.append(
                        prepare_score(
                            backend,
                            query,
                            document,
                            params.instruction_text(),
                            truncate=params.truncates,
                        )
                    )
            return prepared

        return await self.prepare_each(params.items(), params.place, run, slots)

    def response_writer(
        self, params: RerankRequest, prepared: Sequence[Prepared], request_id: str
    ) -> "RerankWriter":
        """The writer of the scores."""
        with_documents = params.return_documents
        if with_documents is None:
            with_documents = self._returns_documents
        return RerankWriter(self.context.backend, params, prepared, f"rerank-{request_id}", with_documents)


class RerankWriter(PooledResults):
    """Writes the reply of one request in the form of all three APIs."""

    def __init__(
        self,
        backend: Backend,
        params: RerankRequest,
        prepared: Sequence[Prepared],
        reply_id: str,
        with_documents: bool,
    ) -> None:
        super().__init__(backend, prepared, params.ignored_fields())
        self._params = params
        self._head = {"id": reply_id, "object": "list", "model": backend.model}
        self._with_documents = with_documents

    def body(self) -> dict[str, Any]:
        """The reply's JSON: documents by falling score, at most ``top_n``.

        Of equal ones the earlier first.
        """
        scores = [0.0 if result is None else float(result[0]) for result in self.results]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._params.top_n]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": self._params.document_echo(index)} if self._with_documents else {}),
            }
            for index in order
        ]
        return {
            **self._head,
            "results": results,
            "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens},
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": self.prompt_tokens},
            },
            "vlfit": self.extras(),
        }


def rerank_routes(context: ServerContext) -> list[Route]:
    """All routes; Cohere's second version sends no documents back unless asked to."""
    return [
        Route(path, RerankEndpoint(context, returns_documents=path != COHERE_V2), methods=["POST"])
        for path in ROUTES
    ]


RERANK = Dialect("Rerank", ROUTES, rerank_routes, PATHS, error_form, ERROR_SCHEMA)
