"""docs/cli.md says what the program says."""

from pathlib import Path

from scripts.cli_docs import help_page
from typer.main import get_command

from vlfit.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_equals_the_programs_help() -> None:
    assert PAGE.read_text() == help_page(), "run `make docs`"


def test_every_command_is_there_with_examples() -> None:
    page = help_page()
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert commands == {
        *(
            "caption",
            "ask",
            "scene",
            "detect",
            "batch",
            "embed",
            "search",
            "mcp",
            "chat",
            "serve",
            "pull",
            "convert",
            "models",
        ),
        *("machine", "plan", "doctor", "top", "sleep", "wake", "bench", "verify", "status", "stop"),
        "completion",
    }
    for name in commands:
        section = page.split(f"## vlfit {name}\n")[1].split("\n## ")[0]
        assert f"Usage: vlfit {name}" in section
        assert "Examples:" in section, name
        assert "\x1b" not in section
