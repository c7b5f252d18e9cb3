"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import Any

from vlfit.server.error_replies import ErrorFacts, error_facts

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the invalid field"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_form(facts: ErrorFacts) -> dict[str, Any]:
    """The body of an error's response in OpenAI's form; its ``type`` follows from the status."""
    kind = "invalid_request_error" if facts.status < 500 else "server_error"
    if facts.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": facts.message, "type": kind, "param": facts.param, "code": facts.code}}


def error_body(error: Exception) -> dict[str, Any]:
    """The body of the response to ``error``, in OpenAI's form (``error_facts``, ``error_form``)."""
    return error_form(error_facts(error))
