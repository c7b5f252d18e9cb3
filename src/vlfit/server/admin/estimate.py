"""``/v1/vlfit/price``: estimated cost of a chat; ``/v1/vlfit/plan``: the memory plan.

Tokens are counted by preparing the request as if it were to run, pictures included.
"""

import math
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest
from vlfit.plan.actual import Expectation
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.inline_files import parse_request, use_files
from vlfit.server.chat.preparation import file_urls, prepare_chat, read_chat
from vlfit.server.chat.request_params import chat_sampling_params
from vlfit.server.error_replies import JSONReply
from vlfit.server.generation import ServerContext, read_request
from vlfit.server.http.admission import Slots


class EstimateEndpoints:
    """The endpoints ``price`` (of one chat) and ``plan`` (of the running model)."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def price(self, request: Request) -> Response:
        """Reply with the prompt tokens, KV cache and generation time that the chat in the body would take.

        The chat is prepared, its pictures included, but no token is generated. ``decode_s`` of the reply:
        seconds to generate ``max_tokens`` tokens of one completion with nothing else running, without queue
        and prefill; null if the plan has no speeds. Token counts are null if only a remote server can count.
        Raises as ``/v1/chat/completions`` does before its first token.
        """
        context = self._context
        context.shutdown.check_accepting()
        body = await context.shutdown.run_until_disconnect(read_request(request, context.settings.body_limit))
        params, files = await context.prepare_threads.run(parse_request, read_chat, file_urls, body)
        del body
        use_files(files)
        context.use_model(params.model)
        try:
            # Decoding pictures is work too: it takes a slot, like one completion.
            with context.admission.acquire(1) as slots:
                prepared = await context.shutdown.run_until_disconnect(
                    self._prepare(params, slots), request.receive
                )
                return JSONReply(self._estimate(params, prepared))
        finally:
            context.heap_trimmer.request_ended()

    async def plan(self, request: Request) -> Response:
        """Reply with the planned ledger and the running engine's settings.

        Raises ``InvalidRequest`` for any query parameter: only ``vlfit plan`` plans for other settings.
        """
        _reject_query_params(request)
        backend, expectation = self._context.backend, self._context.expectation
        facts: dict[str, Any] = {"model": backend.model}
        if backend.capabilities.account:
            settings = backend.account().settings
            names = ("context", "image_tokens", "sequences", "chunk", "kv_tokens")
            facts |= {
                "backend": backend.kind,
                "device": settings.device,
                "settings": {name: getattr(settings, name) for name in names},
            }
        else:
            facts |= {"backend": backend.kind, "device": backend.device}
        lines = [asdict(line) for line in expectation.lines]
        planned = sum(line.bytes for line in expectation.lines)
        return JSONReply(
            {**facts, "lines": lines, "total": planned, "note": expectation.no_lines_reason or None}
        )

    async def _prepare(self, params: ChatRequest, slots: Slots) -> Prepared:
        await self._context.models.load(self._context.model)
        sampling = chat_sampling_params(params, self._context.backend)
        return await prepare_chat(self._context, params, sampling, slots)

    def _estimate(self, params: ChatRequest, prepared: Prepared) -> dict[str, Any]:
        backend, count = self._context.backend, params.n or 1
        max_tokens = prepared.max_tokens
        facts = {
            "model": backend.model,
            "prompt_tokens": prepared.prompt_tokens,
            "image_tokens": prepared.image_tokens,
            "images": [asdict(image) for image in prepared.images],
            "completions": count,
            "max_tokens": max_tokens,
        }
        if not prepared.prompt_tokens:  # no prompt is empty, so the backend cannot count
            unknown = dict.fromkeys(("prompt_tokens", "image_tokens", "images", "decode_s"))
            note = "prompt tokens are unknown here: the remote server counts them when it runs the request"
            return {**facts, **unknown, "max_tokens": max_tokens or None, "note": note}
        if backend.capabilities.account:
            account = backend.account()
            pool, kv_bytes = account.pool, account.memory.kv_cache
            # The last token of a completion is never fed back, so it is not in the KV cache.
            blocks = count * math.ceil((prepared.prompt_tokens + max_tokens - 1) / pool.block_size)
            facts["kv_cache"] = {
                "tokens": blocks * pool.block_size,
                "bytes": round(blocks * kv_bytes / pool.blocks) if pool.blocks else 0,
                "of_blocks": pool.blocks,
                "blocks": blocks,
            }
        facts["decode_s"] = _decode_seconds(self._context.expectation, prepared)
        return facts


def _reject_query_params(request: Request) -> None:
    """Refuse all query parameters: a client asking for another model's plan would mistake this one for it."""
    for name in request.query_params:
        raise InvalidRequest(
            f"vlfit does not support {name[:80]!r} here: this is the plan of the running server",
            "For other plans use `vlfit plan`.",
            param=name[:80],
        )


def _decode_seconds(expectation: Expectation, prepared: Prepared) -> dict[str, float] | None:
    """Expected and slowest decode time of one completion running alone; None if the plan has no speeds.

    A step reads the tokens before it, on average the prompt and half of the completion.
    """
    if expectation.expected is None or expectation.slowest is None:
        return None
    steps = max(prepared.max_tokens - 1, 0)
    cached = prepared.prompt_tokens + prepared.max_tokens / 2
    return {
        name: round(steps * (pace.base_s + pace.per_token_s * cached), 3)
        for name, pace in (("expected", expectation.expected), ("slowest", expectation.slowest))
    }
