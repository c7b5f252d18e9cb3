"""OpenAI's API: its routes, their description, and the form of its errors."""

from starlette.routing import Route

from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.dialect import EVENT_STREAM, ApiPath, Dialect
from vlfit.server.generation import ServerContext
from vlfit.server.openai.chat_completions import ChatEndpoint
from vlfit.server.openai.completions import CompletionRequest, CompletionsEndpoint
from vlfit.server.openai.error_form import ERROR_SCHEMA, error_form
from vlfit.server.openai.openai_embeddings import EmbeddingRequest, EmbeddingsEndpoint
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
    ApiPath("/v1/models", "get", "OpenAI", "List the served models.", "A list of models."),
    ApiPath("/v1/models/{model}", "get", "OpenAI", "Get a served model by name.", "The model, or 404."),
    ApiPath(
        "/v1/embeddings",
        "post",
        "OpenAI",
        "Vectors of texts, pictures, or both.",
        "A list of vectors, as numbers or in base64. The extra field vlfit says what kind of model it was.",
        EmbeddingRequest,
    ),
)


def openai_routes(context: ServerContext) -> list[Route]:
    """The ``POST`` routes; ``/v1/models`` is the server's own."""
    return [
        Route("/v1/chat/completions", ChatEndpoint(context), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(context), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(context), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingsEndpoint(context), methods=["POST"]),
    ]


OPENAI = Dialect("OpenAI", ("/v1",), openai_routes, PATHS, error_form, ERROR_SCHEMA)
