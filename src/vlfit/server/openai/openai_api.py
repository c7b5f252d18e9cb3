"""OpenAI's API: its routes, their description, and the form of its errors."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit.errors import UnknownModel
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.dialect import EVENT_STREAM, ApiPath, Dialect
from vlfit.server.generation import ServerContext
from vlfit.server.openai.chat_completions import ChatEndpoint
from vlfit.server.openai.completions import CompletionRequest, CompletionsEndpoint
from vlfit.server.openai.error_form import ERROR_SCHEMA, error_form
from vlfit.server.openai.responses import ResponseRequest, ResponsesEndpoint

PATHS = (
    ApiPath(
        "/v1/chat/completions",
        "post",
        "OpenAI",
        "Chat completion with pictures, clips, tools and structured output.",
        "A chat completion. The extra field vlfit has what the model saw of each picture, and timings.",
        ChatRequest,
        EVENT_STREAM,
    ),
    ApiPath(
        "/v1/responses",
        "post",
        "OpenAI",
        "OpenAI's Responses API, stateless: send the whole conversation in every request.",
        "A response, or its named events if streamed.",
        ResponseRequest,
        EVENT_STREAM,
    ),
    ApiPath(
        "/v1/completions",
        "post",
        "OpenAI",
        "Text completion without a chat template.",
        "A text completion.",
        CompletionRequest,
        EVENT_STREAM,
    ),
    ApiPath("/v1/models", "get", "OpenAI", "List the served model.", "A list of one model."),
    ApiPath("/v1/models/{model}", "get", "OpenAI", "Get the served model by name.", "The model, or 404."),
    ApiPath(
        "/v1/embeddings",
        "post",
        "OpenAI",
        "Not supported: always 404, since generative models have no useful embeddings.",
        "Never returned.",
        {"type": "object"},
    ),
)


def openai_routes(context: ServerContext) -> list[Route]:
    """The ``POST`` routes; ``/v1/models`` is the server's own. ``/v1/embeddings`` always replies 404."""

    async def embeddings(_: Request) -> Response:
        """Always 404: hidden states of a generative model make poor embeddings."""
        raise UnknownModel(
            f"{context.backend.model!r} generates text and has no embeddings",
            "Use an embedding model.",
            param="model",
        )

    return [
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]


OPENAI = Dialect("OpenAI", ("/v1",), openai_routes, PATHS, error_form, ERROR_SCHEMA)
