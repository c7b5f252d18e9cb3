"""All dialects of the server, and which of them a path belongs to. A new one gets its line here."""

from vlfit.server.anthropic.anthropic_api import ANTHROPIC
from vlfit.server.dialect import Dialect
from vlfit.server.llama_cpp.llama_cpp_api import LLAMA_CPP
from vlfit.server.ollama.ollama_api import OLLAMA
from vlfit.server.openai.openai_api import OPENAI

DIALECTS: tuple[Dialect, ...] = (OPENAI, OLLAMA, ANTHROPIC, LLAMA_CPP)
_BY_PREFIX = sorted(
    ((prefix, each) for each in DIALECTS for prefix in each.prefixes), key=lambda pair: -len(pair[0])
)


def dialect_of(path: str) -> Dialect:
    """The dialect with the longest prefix of ``path``; OpenAI's if none has one."""
    return next((dialect for prefix, dialect in _BY_PREFIX if path.startswith(prefix)), OPENAI)


def needs_key(path: str) -> bool:
    """Whether ``path`` requires the API key, if the server has one.

    True for ``/metrics`` and below the prefixes of all dialects, ``/v1/vlfit/...`` included. All others are
    open: ``/``, ``/page/...``, ``/docs``, ``/openapi.json``, ``/health``, ``/ready``, unknown paths.
    """
    return path == "/metrics" or any(path.startswith(prefix) for prefix, _ in _BY_PREFIX)
