"""Requests to rerank documents in Jina's, Cohere's and vLLM's form, and what each of their fields does."""

from itertools import islice
from typing import Annotated, Any, Union

from pydantic import Discriminator, Field, Tag

from vlfit.errors import InvalidRequest
from vlfit.server.chat.chat_schema import (
    BOOKKEEPING,
    MAX_IGNORED_SHOWN,
    MAX_PARTS,
    ContentPart,
    FailOnFirst,
    StrictModel,
)
from vlfit.server.chat.foreign_fields import Effect
from vlfit.server.chat.validation import parse_body
from vlfit.server.embeddings.pooled_endpoint import MAX_INPUTS, Item, item_of

_NOT_CUT = "a document that does not fit is refused, or cut with `truncation`"
_SCORES = "scores are always from 0 to 1"

# Every field that Cohere (v1, v2), Jina and vLLM document for this route, with what vlfit does with it.
FIELDS: dict[str, tuple[Effect, str]] = {
    "model": ("honoured", "any name that `vlfit serve` takes for the served model; unknown ones get 404"),
    "query": ("honoured", "a text, or an object as in `documents`"),
    "documents": (
        "honoured",
        "texts, or objects with `text`, `image` (URL or base64) or both, or with `content` (parts as in a"
        f" chat message); at most {MAX_INPUTS:,}",
    ),
    "top_n": ("honoured", "the best so many; all by default"),
    "return_documents": (
        "honoured",
        "true by default, as in Jina's API and vLLM; false for `/v2/rerank`. Pictures sent in base64 are not"
        " sent back",
    ),
    "instruction": ("honoured", "what counts as relevant; the model's own by default"),
    "instruct": ("honoured", "another name of `instruction` (SGLang)"),
    "truncation": ("honoured", "true: a text that does not fit is cut at its end"),
    "truncate_prompt_tokens": ("honoured", "-1 is `truncation` (vLLM); other values are refused"),
    "rank_fields": ("refused", "accepted only if it is `text`: put the fields into one text"),
    "return_embeddings": ("refused", "accepted only if false: a reranker has none"),
    "use_activation": ("refused", f"accepted only if true: {_SCORES}"),
    "activation": ("refused", f"accepted only if true: {_SCORES}"),
    "softmax": ("refused", f"accepted only if true: {_SCORES}"),
    "mm_processor_kwargs": ("refused", "accepted only if empty: send smaller pictures"),
    "chat_template": ("refused", "the model was trained with its own"),
    "max_tokens_per_doc": ("ignored", _NOT_CUT),
    "max_chunks_per_doc": ("ignored", _NOT_CUT),
    "max_doc_length": ("ignored", _NOT_CUT),
    "max_query_length": ("ignored", _NOT_CUT),
    "priority": ("ignored", "requests run in order of arrival"),
    "user": ("ignored", ""),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rank_fields": (["text"], []),
    "return_embeddings": (False,),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (True,),
    "mm_processor_kwargs": ({},),
    "chat_template": ("",),
}


def _kind_of_side(value: Any) -> str:
    return "object" if isinstance(value, dict) else "str"


class SideObject(StrictModel):
    """``text``, a picture (``image``: URL or base64), or both; or ``content``: parts as in a chat message."""

    text: str | None = None
    image: str | None = None
    content: Annotated[list[ContentPart], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None

    def item(self) -> Item:
        """The query or document as one chat message would have it."""
        return item_of(self.text, self.image) if self.content is None else self.content


Side = Annotated[
    Union[Annotated[str, Tag("str")], Annotated[SideObject, Tag("object")]],  # noqa: UP007
    Discriminator(_kind_of_side),
]


class RerankRequest(StrictModel):
    """``POST /v1/rerank``, ``/rerank`` and ``/v2/rerank``."""

    query: Side
    documents: Annotated[list[Side], Field(min_length=1, max_length=MAX_INPUTS), FailOnFirst()]
    model: str | None = None
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    instruction: str | None = None
    instruct: str | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def stream(self) -> bool:
        """Never: the reply is one JSON object."""
        return False

    def items(self) -> list[Item]:
        """The query, then the documents."""
        return [side if isinstance(side, str) else side.item() for side in (self.query, *self.documents)]

    def place(self, index: int) -> str:
        """The field of item ``index`` of ``items``."""
        return f"documents[{index - 1}]" if index else "query"

    def instruction_text(self) -> str | None:
        """What counts as relevant; None: the model's own."""
        return self.instruction if self.instruction is not None else self.instruct

    @property
    def truncates(self) -> bool:
        """Whether texts that do not fit are cut."""
        return bool(self.truncation) or self.truncate_prompt_tokens == -1

    def document_echo(self, index: int) -> dict[str, Any]:
        """Document ``index`` for the reply; a picture only if it was sent as a URL."""
        document = self.documents[index]
        if isinstance(document, str):
            return {"text": document}
        sent = {"text": document.text, "image": document.image}
        if document.content is not None:
            texts = [part.text for part in document.content if part.type == "text"]
            sent["text"] = "".join(texts) or None
        is_url = (document.image or "")[:8].lower().startswith(("http://", "https://"))
        return {
            name: value for name, value in sent.items() if value is not None and (name == "text" or is_url)
        }

    def ignored_fields(self) -> tuple[str, ...]:
        """Names of fields that were sent without effect; at most ``MAX_IGNORED_SHOWN``."""
        names = (name for name in self.model_extra or {} if name not in BOOKKEEPING and name not in _NEUTRAL)
        return tuple(islice(names, MAX_IGNORED_SHOWN))


def read_rerank_request(body: bytes | bytearray) -> RerankRequest:
    """Parse the body. Raises ``InvalidRequest``, also for fields that would change the scores."""
    params = parse_body(RerankRequest, body)
    for index, item in enumerate(params.items()):
        if not item:
            place = params.place(index)
            raise InvalidRequest(f"{place} is empty", "Send some text or a picture.", param=place)
    for name, neutral in _NEUTRAL.items():
        value = (params.model_extra or {}).get(name)
        if value is not None and not any(value == each for each in neutral):
            raise InvalidRequest(f"vlfit does not support {name}", f"Leave {name} out.", param=name)
    if params.truncate_prompt_tokens not in (None, -1):
        raise InvalidRequest(
            f"truncate_prompt_tokens is {params.truncate_prompt_tokens}",
            "Use -1, which cuts texts to the context, or leave it out.",
            param="truncate_prompt_tokens",
        )
    return params
