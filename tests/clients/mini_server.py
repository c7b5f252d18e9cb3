"""What the tests of clients share: a server with mini that calls tools, and the table of features.

A client's script prints ``CLIENT: works: FEATURE`` once a feature has worked. ``docs/clients.md`` has a row
for each client, whose features must be those lines: the table is what was seen.
"""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.harness import Running, running
from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Listener, Timings, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared, Ticket
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv" / "clients"
PICTURE = ROOT / "examples" / "pictures" / "number-25.png"
SCRIPTS = Path(__file__).parent
TABLE = ROOT / "docs" / "clients.md"
YES = "yes"


class NeverCancelled(Ticket):
    def cancel(self) -> None:
        """No effect: the call is written at once."""


class ToolCaller(NativeBackend):
    """mini, which is too small to choose a tool, with a script for that one choice.

    It calls the first tool of a request that leaves the choice to the model; when the conversation has a
    tool's result, and where a grammar forces the call, mini itself answers.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._choices: list[tuple[Prepared, Tool]] = []

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Any:
        prepared = super().prepare(conversation, sampling, tools)
        if tools and sampling.grammar is None and all(each.role != "tool" for each in conversation):
            self._choices.append((prepared, tools[0]))
        return prepared

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        chosen = [tool for each, tool in self._choices if each is prepared]
        self._choices = [pair for pair in self._choices if pair[0] is not prepared]
        if not chosen:
            return super().start(prepared, sampling, listener)
        threading.Thread(target=_call, args=(prepared, chosen[0], listener), daemon=True).start()
        return NeverCancelled()


def _call(prepared: Prepared, tool: Tool, listener: Listener) -> None:
    arguments = {name: _value(schema) for name, schema in tool.parameters.get("properties", {}).items()}
    words = json.dumps({"name": tool.name, "arguments": arguments})
    for piece in ("<tool_call>", "\n", words[:10], words[10:], "\n</tool_call>"):
        listener(Chunk(piece))
    usage = Usage(prepared.prompt_tokens, prepared.image_tokens, 5)
    listener(Chunk("", (), "stop", usage, Timings(0.0, 0.01, 0.02, 5)))


def _value(schema: dict[str, Any]) -> str:
    return str(schema["enum"][0]) if schema.get("enum") else "left"


@contextmanager
def mini_server() -> Iterator[Running]:
    """A server with mini that calls tools, for as long as the block lasts."""
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=4)
    with (
        ToolCaller.load("mini", options) as backend,
        running(backend, ServerSettings(context=1024)) as server,
    ):
        yield server


def check(command: list[str]) -> None:
    """Run a client's script; what worked of each client must be just its row in the table."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout[-500:] + ended.stderr[-3000:]
    assert ended.stdout.strip().endswith("fine")
    seen: dict[str, set[str]] = {}
    for client, feature in re.findall(r"^(.+): works: (.+)$", ended.stdout, re.MULTILINE):
        seen.setdefault(client, set()).add(feature)
    assert seen, ended.stdout
    table = promised()
    for client, features in seen.items():
        assert {name for name, cell in table[client].items() if cell == YES} == features, client


def promised() -> dict[str, dict[str, str]]:
    """The table of docs/clients.md: cells by client and feature, ``YES`` or the reason why not."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.read_text("utf-8").splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in body}
