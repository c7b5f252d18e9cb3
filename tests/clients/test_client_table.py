"""docs/clients.md has a row for every client with a script; ``make test-clients`` checks its cells."""

import re

from tests.clients.mini_server import SCRIPTS, YES, promised

# A script of several routes or transports prints each as a client.
WAYS = {
    "litellm, {route}": {"litellm, openai", "litellm, anthropic"},
    "mcp, {name}": {"mcp, stdio", "mcp, HTTP"},
    "${client}": {"ollama (npm)", "ai-sdk-ollama"},
}


def test_every_client_has_its_row() -> None:
    scripts = [*SCRIPTS.glob("with_*.py"), *SCRIPTS.glob("npm/with_*.mjs")]
    assert len(scripts) > 10
    clients: set[str] = set()
    for script in scripts:
        [name] = set(re.findall(r"""["`]([^"`]+): works: \$?{feature}""", script.read_text("utf-8")))
        clients |= WAYS.get(name, {name})
    assert set(promised()) == clients


def test_a_missing_feature_has_its_reason() -> None:
    for client, cells in promised().items():
        assert YES in cells.values(), client
        assert all(len(cell) > len(YES) for cell in cells.values() if cell != YES), client
