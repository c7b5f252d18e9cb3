"""The table of fields: as the schema has it, as docs/anthropic.md has it, and as the server does."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.server.anthropic.test_messages import HELLO, TOOL
from tests.server.harness import Running
from tests.server.scripted import ScriptedBackend
from vlfit.server.anthropic.anthropic_schema import (
    FIELDS,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolResultBlock,
    ToolUseBlock,
)

ROOT = Path(__file__).parents[3]
BOOKKEEPING = {"cache_control", "betas", "billing_policy", "user_profile_id", "workspace_id", "diagnostics"}
BOOKKEEPING |= {"inference_geo", "metadata", "service_tier", "caller"}


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
        ("messages", AnthropicMessage),
        ("text", TextBlock),
        ("image", ImageBlock),
        ("document", DocumentBlock),
        ("tool_use", ToolUseBlock),
        ("tool_result", ToolResultBlock),
        ("thinking", ThinkingBlock),
        ("tools", AnthropicTool),
        ("tool_choice", AnthropicToolChoice),
        ("thinking config", ThinkingConfig),
        ("output_config", OutputConfig),
    ],
)
def test_the_table_and_the_schema_agree(section: str, model: type[BaseModel]) -> None:
    """Fields with an effect are in the schema; of those that are ignored only some, to check their type."""
    fields = set(model.model_fields)
    effective = {name for name, (effect, _) in FIELDS[section].items() if effect != "ignored"}
    assert effective <= fields
    assert fields <= {*FIELDS[section], *FIELDS["/v1/messages"]}


def test_the_table_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "anthropic.md").read_text("utf-8")
    for section, fields in FIELDS.items():
        for name, (effect, note) in fields.items():
            assert f"| `{name}` | {effect} | {note} |" in page, (section, name)


def test_fields_of_a_request_do_as_the_table_says(server: Running, scripted: ScriptedBackend) -> None:
    """What is ignored is listed, but for bookkeeping; what is refused is named."""
    table = FIELDS["/v1/messages"]
    ignored = {name for name, (effect, _) in table.items() if effect == "ignored"}
    body: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
    answer = httpx.post(f"{server.url}/v1/messages", json=body | {name: {"type": "x"} for name in ignored})
    assert set(answer.json()["vlfit"]["ignored"]) == ignored - BOOKKEEPING
    for name in (name for name, (effect, _) in table.items() if effect == "refused"):
        answer = httpx.post(f"{server.url}/v1/messages", json={**body, name: {"type": "x"}})
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["param"] == name
        # Neutral values are no request for anything.
        assert httpx.post(f"{server.url}/v1/messages", json={**body, name: None}).status_code == 200


def test_fields_of_a_tool_are_listed(server: Running, scripted: ScriptedBackend) -> None:
    ignored = {name for name, (effect, _) in FIELDS["tools"].items() if effect == "ignored"}
    tool = {**TOOL, **dict.fromkeys(ignored, True)}
    body = {"model": "scripted", "max_tokens": 9, "messages": HELLO, "tools": [tool]}
    told = httpx.post(f"{server.url}/v1/messages", json=body).json()["vlfit"]["ignored"]
    assert set(told) == {f"tools[0].{name}" for name in ignored - BOOKKEEPING}
