"""Routes of llama.cpp's server beside OpenAI's API: properties, slots, tokens, templates.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md; docs/llama-cpp.md has what differs.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlfit._version import __version__
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.checkpoint.gguf.gguf_checkpoint import gguf_sources
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import QueueFull
from vlfit.server.chat.model_facts import checkpoint_of, sees_pictures
from vlfit.server.chat.validation import parse_body
from vlfit.server.dialect import ApiPath, Dialect
from vlfit.server.error_replies import EncodedJSON, ErrorFacts, JSONReply, encode_json
from vlfit.server.generation import MAX_INLINE_BODY, ServerContext, read_body
from vlfit.server.llama_cpp.llama_cpp_schema import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from vlfit.server.llama_cpp.model_text import MEDIA_MARKER, ModelText, special_tokens_of
from vlfit.server.models.served_models import ServedModel
from vlfit.units import MIB

_BODY_LIMIT = 2 * MIB  # of texts and tokens
_ANY_SEED = 2**32 - 1  # how llama.cpp writes it
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer", "description": "the HTTP status"},
                "message": {"type": "string"},
                "type": {"type": "string"},
            },
        }
    },
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

MOST_PENDING = 33  # requests for tokens and templates, of up to ``_BODY_LIMIT`` each: one runs, others wait
_SLICE = 4096  # tokens encoded as JSON at a time

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")

PATHS = (
    ApiPath(
        "/props",
        "get",
        "llama.cpp",
        "Properties of the server: model, context, modalities, chat template.",
        "The properties.",
    ),
    ApiPath("/slots", "get", "llama.cpp", "Requests that can run at once.", "A list of slots."),
    ApiPath(
        "/tokenize", "post", "llama.cpp", "Turn text into tokens.", "Ids, or ids and texts.", TokenizeRequest
    ),
    ApiPath("/detokenize", "post", "llama.cpp", "Turn tokens into text.", "The text.", DetokenizeRequest),
    ApiPath(
        "/apply-template",
        "post",
        "llama.cpp",
        "Render the chat template, without running it.",
        "The prompt as text.",
        ApplyTemplateRequest,
    ),
)


def error_form(facts: ErrorFacts) -> dict[str, Any]:
    """An error's response. It has no field for the request's field at fault: the message names it."""
    kind = "invalid_request_error" if facts.status < 500 else "server_error"
    if facts.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    kind = _ERROR_TYPES.get(facts.status, kind)
    message = facts.message
    if facts.param and facts.param not in message:
        message = f"{facts.param}: {message}"
    return {"error": {"code": facts.status, "message": message, "type": kind}}


def _with_pieces(text: ModelText, ids: Sequence[int]) -> list[Any]:
    return [{"id": i, "piece": piece} for i, piece in zip(ids, text.pieces(ids), strict=True)]


class LlamaCppRoutes:
    """Handlers of the routes of llama.cpp's server.

    A model's tokenizer and chat template are read from its files at the first request and kept.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._texts: dict[str, ModelText] = {}
        self._turn = asyncio.Semaphore(1)
        self._num_pending = 0

    async def props(self, request: Request) -> Response:
        """``GET /props``: properties of the default model, or of the one that ``?model=`` names."""
        model = self._context.models.find(request.query_params.get("model"))
        properties = await self._context.prepare_threads.run(self._props, model)
        return JSONReply(properties)

    async def slots(self, request: Request) -> Response:
        """``GET /slots``: an entry for each request that can run at once; those of running requests come
        first.

        With ``?fail_on_no_slot=1`` raises ``QueueFull`` (a 503) if all are in use.
        """
        model = self._context.models.find(request.query_params.get("model"))
        backend, total = model.backend, self._num_slots(model.backend)
        running = (
            backend.account().running if backend.capabilities.account else self._context.admission.in_use
        )
        if request.query_params.get("fail_on_no_slot") == "1" and running >= total:
            raise _NoSlot(f"all {total} slots are in use", "Try again later.")
        state = {"id_task": -1, "n_ctx": _context_of(model), "speculative": _speculates(backend)}
        return JSONReply([{"id": index, **state, "is_processing": index < running} for index in range(total)])

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the token ids of a text, with ``with_pieces`` also the text of each."""
        params = await self._parse(request, TokenizeRequest)
        text = self._text_of(params.model)

        def run() -> EncodedJSON:
            ids = text.tokenize(
                params.content, add_special=params.add_special, parse_special=params.parse_special
            )
            slices = (ids[start : start + _SLICE] for start in range(0, len(ids), _SLICE))
            if params.with_pieces:
                listed = (_with_pieces(text, each) for each in slices)
            else:
                listed = (list[Any](each) for each in slices)
            # Encoded slice by slice, as the encoder holds the interpreter's lock.
            parts = (encode_json(each)[1:-1] for each in listed)
            return EncodedJSON(b'{"tokens":[' + b",".join(parts) + b"]}")

        return JSONReply(await self._in_turn(run))

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: the text of token ids."""
        params = await self._parse(request, DetokenizeRequest)
        text = self._text_of(params.model)
        return JSONReply({"content": await self._in_turn(lambda: text.detokenize(params.tokens))})

    async def apply_template(self, request: Request) -> Response:
        """``POST /apply-template``: the prompt of a conversation as text, by the model's chat template."""
        params = await self._parse(request, ApplyTemplateRequest)
        text = self._text_of(params.model)

        def run() -> str:
            return text.render(
                params.messages,
                params.tools or (),
                params.chat_template_kwargs or {},
                add_generation_prompt=params.add_generation_prompt,
            )

        return JSONReply({"prompt": await self._in_turn(run)})

    async def _in_turn(self, run: Callable[[], T]) -> T:
        """Call ``run`` on a thread, and one such request at a time: a long text takes seconds and memory.

        Raises ``QueueFull`` if ``MOST_PENDING`` run or wait already.
        """
        if self._num_pending >= MOST_PENDING:
            raise QueueFull(f"{self._num_pending} requests wait for the tokenizer", "Try again in a second.")
        self._num_pending += 1
        try:
            async with self._turn:
                return await self._context.prepare_threads.run(run)
        finally:
            self._num_pending -= 1

    async def _parse(self, request: Request, kind: type[Body]) -> Body:
        context = self._context
        context.shutdown.check_accepting()
        limit = min(_BODY_LIMIT, context.settings.body_limit)
        body = await context.shutdown.run_until_disconnect(read_body(request, limit))
        if len(body) <= MAX_INLINE_BODY:
            return parse_body(kind, body)
        return await context.prepare_threads.run(parse_body, kind, body)

    def _text_of(self, name: str | None) -> ModelText:
        backend = self._context.models.find(name).backend
        if backend.model not in self._texts:
            self._texts[backend.model] = ModelText(backend)
        return self._texts[backend.model]

    def _num_slots(self, backend: Backend) -> int:
        """Requests that run at once; for an engine elsewhere, those that this server admits, or 1."""
        if backend.capabilities.account:
            return backend.account().settings.sequences
        return self._context.settings.max_completions or 1

    def _props(self, model: ServedModel) -> dict[str, Any]:
        backend = model.backend
        checkpoint = checkpoint_of(backend)
        template, special = backend.chat_template, special_tokens_of(backend)
        return {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": _context_of(model),
                "speculative": _speculates(backend),
                "is_processing": False,
                "params": _sampling(backend.default_sampling()),
                "prompt": "",
            },
            "total_slots": self._num_slots(backend),
            "model_alias": backend.model,
            "model_path": _path_of(checkpoint.folder) if checkpoint is not None else "",
            "chat_template": template,
            "chat_template_caps": {
                "supports_tools": "tools" in template,
                "supports_tool_calls": "tool_calls" in template,
            },
            "modalities": {"vision": sees_pictures(backend), "audio": False},
            "media_marker": MEDIA_MARKER,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"vlfit {__version__}",
            "is_sleeping": backend.asleep,
        }


class _NoSlot(QueueFull):
    """Every slot is in use, and the client asked to be told so."""

    http_status = 503


def _path_of(folder: Path) -> str:
    """Where the model is: its folder, or its GGUF file."""
    sources = gguf_sources(folder)
    return str(folder if sources is None else sources.model[0])


def _context_of(model: ServedModel) -> int:
    return model.context or model.backend.context or 0


def _speculates(backend: Backend) -> bool:
    return backend.capabilities.account and backend.account().settings.speculate


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The checkpoint's sampling under llama.cpp's names."""
    return {
        "n_predict": sampling.max_tokens or -1,
        "max_tokens": sampling.max_tokens or -1,
        "seed": _ANY_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "stream": False,
    }


def llama_cpp_routes(context: ServerContext) -> list[Route]:
    """All routes; they share the tokenizers that they have read."""
    routes = LlamaCppRoutes(context)
    return [
        Route("/props", routes.props),
        Route("/slots", routes.slots),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
        Route("/detokenize", routes.detokenize, methods=["POST"]),
        Route("/apply-template", routes.apply_template, methods=["POST"]),
    ]


def model_fields(model: ServedModel) -> dict[str, Any]:
    """``meta`` of a model's card in ``/v1/models``; {} for a model that another server runs."""
    checkpoint = checkpoint_of(model.backend)
    if checkpoint is None:
        return {}
    meta: dict[str, Any] = {"n_ctx": _context_of(model)}
    if isinstance(checkpoint, Checkpoint):
        text = checkpoint.config.text
        meta |= {
            "n_ctx_train": text.max_position_embeddings,
            "n_vocab": text.vocab_size,
            "n_embd": text.hidden_size,
        }
    else:
        config: Any = checkpoint.config
        fields = config.get("text_config") or config
        names = {"n_ctx_train": "max_position_embeddings", "n_vocab": "vocab_size", "n_embd": "hidden_size"}
        meta |= {name: fields[key] for name, key in names.items() if isinstance(fields.get(key), int)}
    return {"meta": {**meta, "n_params": checkpoint.parameter_count, "size": checkpoint.weight_bytes}}


LLAMA_CPP = Dialect(
    "llama.cpp",
    ("/props", "/slots", "/tokenize", "/detokenize", "/apply-template"),
    llama_cpp_routes,
    PATHS,
    error_form,
    ERROR_SCHEMA,
    model_fields,
)
