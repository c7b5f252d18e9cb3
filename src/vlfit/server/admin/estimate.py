"""``/v1/vlfit/price``: what a chat would cost, without running it; ``/v1/vlfit/plan``: what was planned for.

Knows: tokens, blocks of the KV cache, and how long the plan says that a step takes. Does not know: how tokens
are counted (the backend prepares the request as if it were to run, pictures and all).
"""

import math
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vlfit.backends.base import Accountable, OpenBackend, Prepared
from vlfit.errors import InvalidRequest
from vlfit.plan.actual import Expectation
from vlfit.server.http.admission import Held
from vlfit.server.openai.chat_completions import prepare_chat, read_chat
from vlfit.server.openai.chat_schema import ChatRequest
from vlfit.server.openai.error_replies import JSONReply
from vlfit.server.openai.generation import Workshop, read_body
from vlfit.server.openai.request_params import sampling_of


class PriceEndpoints:
    """The two routes."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    async def price(self, request: Request) -> Response:
        """Of the chat in the body; refused as that would be."""
        shop = self._workshop
        shop.closing.check()
        body = await shop.closing.watch(read_body(request, shop.settings.body_limit))
        wishes = await shop.work.run(read_chat, body)
        shop.check_model(wishes.model)
        try:
            # Decoding pictures is work like any other: it takes a place, as one completion would.
            with shop.places.take(1) as held:
                prepared = await shop.closing.watch(self._prepared(wishes, held), request.receive)
                return JSONReply(self._facts(wishes, prepared))
        finally:
            shop.trimming.ended()

    async def plan(self, request: Request) -> Response:
        """Line by line, with the settings that it was planned for."""
        _refuse_parameters(request)
        backend, expectation = self._workshop.backend, self._workshop.settings.expectation
        facts: dict[str, Any] = {"model": backend.model}
        if isinstance(backend, Accountable):
            wishes = backend.account().settings
            names = ("context", "image_tokens", "sequences", "chunk", "kv_tokens")
            facts |= {
                "backend": backend.kind,
                "device": wishes.device,
                "settings": {name: getattr(wishes, name) for name in names},
            }
        elif isinstance(backend, OpenBackend):
            facts |= {"backend": backend.kind, "device": backend.device}
        lines = [asdict(line) for line in expectation.lines]
        planned = sum(line.bytes for line in expectation.lines)
        return JSONReply({**facts, "lines": lines, "total": planned, "note": expectation.why_not or None})

    async def _prepared(self, wishes: ChatRequest, held: Held) -> Prepared:
        sampling = sampling_of(wishes, self._workshop.backend.default_sampling())
        return await prepare_chat(self._workshop, wishes, sampling, held)

    def _facts(self, wishes: ChatRequest, prepared: Prepared) -> dict[str, Any]:
        backend, count = self._workshop.backend, wishes.n or 1
        most = prepared.most_tokens
        facts = {
            "model": backend.model,
            "prompt_tokens": prepared.prompt_tokens,
            "image_tokens": prepared.image_tokens,
            "images": [asdict(image) for image in prepared.images],
            "completions": count,
            "max_tokens": most,
        }
        if not prepared.prompt_tokens:  # no prompt is empty: the backend cannot count
            unknown = dict.fromkeys(("prompt_tokens", "image_tokens", "images", "decode_s"))
            note = "what a prompt costs only its answer tells: the server that runs the model counts it then"
            return {**facts, **unknown, "max_tokens": most or None, "note": note}
        if isinstance(backend, Accountable):
            account = backend.account()
            pool, held = account.pool, account.holdings.kv_cache
            # The last token of a completion is never fed back, so it takes no room.
            blocks = count * math.ceil((prepared.prompt_tokens + most - 1) / pool.block_size)
            facts["kv_cache"] = {
                "tokens": blocks * pool.block_size,
                "bytes": round(blocks * held / pool.blocks) if pool.blocks else 0,
                "of_blocks": pool.blocks,
                "blocks": blocks,
            }
        facts["decode_s"] = _decode_seconds(self._workshop.settings.expectation, prepared)
        return facts


def _refuse_parameters(request: Request) -> None:
    """Who asks for the plan of another model or context would take this one for it."""
    for name in request.query_params:
        raise InvalidRequest(
            f"vlfit does not support {name[:80]!r} here: this is the plan of what runs",
            "for another, use `vlfit plan`",
            param=name[:80],
        )


def _decode_seconds(expectation: Expectation, prepared: Prepared) -> dict[str, float] | None:
    """For all tokens of one completion, alone: as the plan expects it and at the slowest; None if it says
    nothing. A step reads the tokens before it, on average the prompt and half of the completion.
    """
    if expectation.expected is None or expectation.slowest is None:
        return None
    steps = max(prepared.most_tokens - 1, 0)
    cached = prepared.prompt_tokens + prepared.most_tokens / 2
    return {
        name: round(steps * (pace.base_s + pace.per_token_s * cached), 3)
        for name, pace in (("expected", expectation.expected), ("slowest", expectation.slowest))
    }
