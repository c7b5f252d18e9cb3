"""All dialects of the server, and which of them a path belongs to. A new one gets its line here."""

from vlfit.server.anthropic.anthropic_api import ANTHROPIC
from vlfit.server.dialect import Dialect
from vlfit.server.llama_cpp.llama_cpp_api import LLAMA_CPP
from vlfit.server.ollama.ollama_api import OLLAMA
from vlfit.server.openai.openai_api import OPENAI
from vlfit.server.rerank.rerank_api import RERANK

DIALECTS: tuple[Dialect, ...] = (OPENAI, OLLAMA, ANTHROPIC, LLAMA_CPP, RERANK)
_BY_PREFIX = sorted(
    ((prefix, each) for each in DIALECTS for prefix in each.prefixes), key=lambda pair: -len(pair[0])
)


def dialect_of(path: str) -> Dialect:
    """The dialect with the longest prefix of ``path``; OpenAI's if none has one."""
    return next((dialect for prefix, dialect in _BY_PREFIX if path.startswith(prefix)), OPENAI)


def needs_key(path: str) -> bool:
    """Whether a request of ``path`` must send an API key, on a server that has keys.

    True for ``/metrics`` and for every path below a prefix of a dialect, such as ``/v1/`` (so
    ``/v1/vlfit/...`` too) and ``/api/``. False for all others: ``/``, ``/page/...``, ``/docs``,
    ``/openapi.json``, ``/health``, ``/ready``, and any other path.
    """
    return path == "/metrics" or any(path.startswith(prefix) for prefix, _ in _BY_PREFIX)
