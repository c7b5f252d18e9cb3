"""Routes that give words, and what they cost. Knows which path leads to which of them, and no more."""

from starlette.routing import Route

from vlfit.server.chat import ChatEndpoint
from vlfit.server.completions import CompletionsEndpoint
from vlfit.server.generating import Workshop
from vlfit.server.responses import ResponsesEndpoint


def word_routes(workshop: Workshop) -> list[Route]:
    """All of them; they share ``workshop``."""
    return [
        Route("/v1/chat/completions", ChatEndpoint(workshop), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(workshop), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(workshop), methods=["POST"]),
    ]
