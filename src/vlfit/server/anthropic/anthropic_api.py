"""Anthropic's Messages API: its routes, their description, and the form of its errors.

docs/anthropic.md has what differs.
"""

from datetime import UTC, datetime
from typing import Any

from starlette.routing import Route

from vlfit.server.anthropic.anthropic_generation import CountTokensEndpoint, MessagesEndpoint
from vlfit.server.anthropic.anthropic_replies import ERROR_SCHEMA, error_form
from vlfit.server.anthropic.anthropic_schema import CountTokensRequest, MessagesRequest
from vlfit.server.dialect import EVENT_STREAM, ApiPath, Dialect
from vlfit.server.generation import ServerContext
from vlfit.server.models.served_models import ServedModel

PATHS = (
    ApiPath(
        "/v1/messages",
        "post",
        "Anthropic",
        "A message, with pictures, documents, tools and structured output.",
        "A message, or its named events if streamed. The extra field vlfit has what the model saw of each"
        " picture, and timings.",
        MessagesRequest,
        EVENT_STREAM,
    ),
    ApiPath(
        "/v1/messages/count_tokens",
        "post",
        "Anthropic",
        "Count the tokens of a message without running it.",
        "input_tokens, pictures and tools included.",
        CountTokensRequest,
    ),
)


def anthropic_routes(context: ServerContext) -> list[Route]:
    """The routes ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""
    return [
        Route("/v1/messages", MessagesEndpoint(context), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(context), methods=["POST"]),
    ]


def model_fields(model: ServedModel) -> dict[str, Any]:
    """The fields that Anthropic's clients read of a model's card in ``/v1/models``."""
    context = model.context or model.backend.context
    return {
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        **({"max_input_tokens": context - 1, "max_tokens": context - 1} if context else {}),
    }


ANTHROPIC = Dialect(
    "Anthropic",
    ("/v1/messages",),
    anthropic_routes,
    PATHS,
    error_form,
    ERROR_SCHEMA,
    model_fields,
    id_header="request-id",
)
