"""Routes that give words, and what they cost. Knows which path leads to which of them, and no more."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit.errors import UnknownModel
from vlfit.server.chat import ChatEndpoint
from vlfit.server.completions import CompletionsEndpoint
from vlfit.server.docs import docs_routes
from vlfit.server.generating import Workshop
from vlfit.server.price import PriceEndpoints
from vlfit.server.responses import ResponsesEndpoint


def word_routes(workshop: Workshop) -> list[Route]:
    """All of them; they share ``workshop``."""
    prices = PriceEndpoints(workshop)

    async def embeddings(_: Request) -> Response:
        """A model that was made to write gives vectors of its hidden states, which mean little: none is
        better.
        """
        raise UnknownModel(
            f"{workshop.backend.model!r} writes words and gives no embeddings",
            "ask a model that was made for them",
            param="model",
        )

    return [
        Route("/v1/chat/completions", ChatEndpoint(workshop), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(workshop), methods=["POST"]),
        Route("/v1/responses", ResponsesEndpoint(workshop), methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/vlfit/price", prices.price, methods=["POST"]),
        Route("/v1/vlfit/plan", prices.plan),
        *docs_routes(),
    ]
