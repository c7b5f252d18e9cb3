"""The process that parses, compiles and renders chat templates, confined by the kernel.

``python -m vlfit.prompt.template_worker FD MEMORY CPU_SECONDS`` is started by ``template_process.py`` with a
clean environment. A template is code by whoever made the checkpoint: Jinja's sandbox keeps it from Python's
internals, ``sandbox.confine`` and ``sandbox.limit_cpu`` bound what it may take. The process ends when its
parent does: at once while it waits, else after the CPU time of a request at most.
"""

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlfit.images import sandbox
from vlfit.images.decode_wire import EXIT_NO_MEMORY, Connection, ConnectionEnded

MAX_MESSAGE_CHARACTERS = 2000  # of an error
_COMPILED = 8  # templates that are kept
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _Refused(TemplateError):
    """Raised by a template's ``raise_exception``."""


def raise_exception(message: str) -> NoReturn:
    """The function of that name in templates."""
    raise _Refused(message)


def chat_environment() -> Environment:
    """Jinja as transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks training targets; a prompt takes its content."""

    tags = {"generation"}  # noqa: RUF012  (how Jinja's base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def run_worker(make_environment: Callable[[], Environment]) -> NoReturn:
    """Confine this process, then answer requests until the parent closes the connection.

    ``make_environment``: called for each template. The process exits with ``EXIT_NO_MEMORY`` if it runs out
    of memory, and is killed by SIGXCPU if it runs out of CPU time. It also exits after a request that left
    it with much memory: the next one has a right to all of it.
    """
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    memory, cpu_seconds = int(sys.argv[2]), int(sys.argv[3])
    sandbox.ignore_terminal()
    sandbox.configure_malloc()
    sandbox.set_process_name("vlfit-template")
    warnings.simplefilter("ignore")
    answer = _answers(make_environment)
    start = sandbox.address_space_bytes()
    sandbox.confine(None, start + memory)
    try:
        connection.send({"ready": True})
        while sandbox.address_space_bytes() - start <= memory // 4:
            head = connection.receive()
            sandbox.limit_cpu(cpu_seconds)
            data = connection.receive_bytes(head["size"])
            reply = answer(data)
            if len(reply) > head["most"]:
                reply = _as_bytes({"error": "long"})
            connection.send({"size": len(reply)}, reply)
            del data, reply
    except ConnectionEnded:
        pass
    except MemoryError:
        os._exit(EXIT_NO_MEMORY)
    os._exit(0)


def _answers(make_environment: Callable[[], Environment]) -> Callable[[bytearray], bytes]:
    """What answers a request, given as JSON, by JSON."""

    @lru_cache(maxsize=_COMPILED)
    def compiled(source: str) -> tuple[Template, str, list[str]]:
        environment = make_environment()
        parsed = environment.parse(source)
        written = {node.data for node in parsed.find_all(nodes.TemplateData)}
        written |= {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        variables = meta.find_undeclared_variables(parsed) - environment.globals.keys()
        return environment.from_string(parsed), "\0".join(sorted(written)), sorted(variables)

    def answer(data: bytearray) -> bytes:
        request: Mapping[str, Any] = json.loads(str(data, "utf-8", "surrogatepass"))
        try:
            template, literals, names = compiled(request["source"])
        except TemplateSyntaxError as error:
            return _failure("syntax", str(error.message), line=error.lineno)
        except RecursionError:
            return _failure("nested", "")
        except MemoryError:
            raise
        except Exception as error:  # what Jinja or Python makes of odd code; constants are computed, too
            return _failure("failed", _described(error))
        if "variables" not in request:
            return _as_bytes({"literals": literals, "variables": names})
        try:
            return _as_bytes({"text": template.render(request["variables"])})
        except _Refused as error:
            return _failure("refused", str(error))
        except MemoryError:
            raise
        except Exception as error:  # a template is code, and may fail in any way that code does
            return _failure("failed", _described(error))

    return answer


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except MemoryError:
        raise
    except Exception:
        return type(error).__name__


def _failure(kind: str, message: str, **more: Any) -> bytes:
    return _as_bytes({"error": kind, "message": message[:MAX_MESSAGE_CHARACTERS], **more})


def _as_bytes(reply: Mapping[str, Any]) -> bytes:
    return _encode(reply).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    run_worker(chat_environment)
