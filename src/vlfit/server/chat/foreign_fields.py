"""Request fields of other servers (vLLM, SGLang, llama.cpp, Ollama) that would change the answer: refused.

Values that change nothing are accepted. Fields in neither this table nor a request's model are ignored and
listed in the response (``vlfit.ignored``); docs/api.md names those that clients often send.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlfit.errors import InvalidRequest

Effect = Literal["honoured", "refused", "ignored"]
"""What becomes of a field that another server's API documents."""


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that is refused, unless its value is one of ``neutral``, which change nothing.

    ``instead``: the error's hint, a whole sentence; empty: the hint is to leave the field out.
    """

    neutral: tuple[Any, ...] = ()
    instead: str = ""


_SCHEMA = RefusedField(
    instead="Use response_format with json_schema, whose schema may have enum and pattern."
)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_LENGTH = RefusedField(instead="Use max_tokens.")

REFUSED_FIELDS: Mapping[str, RefusedField] = {
    # the form of the answer
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _SCHEMA),
    **dict.fromkeys(("guided_whitespace_pattern", "guided_decoding", "structured_outputs"), _SCHEMA),
    **dict.fromkeys(("structural_tag", "regex", "ebnf", "grammar", "json_schema", "format"), _SCHEMA),
    # which tokens are sampled
    "best_of": RefusedField((1,), "Use n, and choose among the answers."),
    "use_beam_search": RefusedField((False,)),
    "length_penalty": RefusedField((1,)),
    "early_stopping": RefusedField((False,)),
    "min_tokens": RefusedField((0,)),
    "min_new_tokens": RefusedField((0,)),
    "bad_words": RefusedField(_EMPTY),
    "allowed_token_ids": RefusedField(_EMPTY, _SCHEMA.instead),
    "logits_processors": RefusedField(_EMPTY),
    "logit_bias": RefusedField(_EMPTY),
    "repetition_detection": RefusedField(_EMPTY, "Use loop_guard."),
    "typical_p": RefusedField((1,)),
    "tfs_z": RefusedField((1,)),
    "top_a": RefusedField((0,)),
    "mirostat": RefusedField((0,)),
    "dynatemp_range": RefusedField((0,)),
    "dry_multiplier": RefusedField((0,)),
    "xtc_probability": RefusedField((0,)),
    # how long it is, and what it has beside the text
    **dict.fromkeys(("n_predict", "max_new_tokens", "num_predict"), _LENGTH),
    "include_stop_str_in_output": RefusedField((False,)),
    "no_stop_trim": RefusedField((False,)),
    "skip_special_tokens": RefusedField((True,)),
    "prompt_logprobs": RefusedField((False,)),
    # the prompt
    "echo": RefusedField((False,), "It is a field of /v1/completions."),
    "suffix": RefusedField(_EMPTY),
    "add_generation_prompt": RefusedField((True,), "Use /v1/completions to write the whole prompt."),
    "continue_final_message": RefusedField((False,), "Use /v1/completions to write the whole prompt."),
    "add_special_tokens": RefusedField((False,), "Use /v1/completions to write the whole prompt."),
    "chat_template": RefusedField(_EMPTY, "Use /v1/completions to write the whole prompt."),
    "chat_template_kwargs": RefusedField(_EMPTY, "It is a field of /v1/chat/completions."),
    "enable_thinking": RefusedField(instead="Send it in chat_template_kwargs."),
    "thinking_token_budget": RefusedField(),
    "documents": RefusedField(_EMPTY, "Put them into messages."),
    "truncate_prompt_tokens": RefusedField(instead="Send less text; vlfit cuts nothing off."),
    "mm_processor_kwargs": RefusedField(_EMPTY, "Use detail of a picture, or send a smaller one."),
    "media_io_kwargs": RefusedField(_EMPTY),
    "options": RefusedField(_EMPTY, "Send its entries as fields of the request, such as temperature."),
}


def refuse_foreign_fields(fields: Mapping[str, Any], n: int | None) -> None:
    """Raise ``InvalidRequest`` for the first of ``fields`` in ``REFUSED_FIELDS``.

    Null and neutral values pass. ``n``: the request's number of choices, None for 1; ``best_of`` passes if it
    is the same number.
    """
    for name, value in fields.items():
        refused = REFUSED_FIELDS.get(name)
        if refused is None or value is None or any(value == neutral for neutral in refused.neutral):
            continue
        if name == "best_of" and value == (n or 1):
            continue
        raise InvalidRequest(
            f"vlfit does not support {name}", refused.instead or f"Leave {name} out.", param=name
        )
