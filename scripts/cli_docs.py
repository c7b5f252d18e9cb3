"""Print docs/cli.md: the help of every command (``make docs``). A test compares the file with the program."""

import typer

from vlfit.cli.main import app

_HEAD = """\
# The command line

What `vlfit --help` and the help of every command say. Written by `make docs`: change the program, not this.
"""


def help_page() -> str:
    """The whole page, as Markdown."""
    sections = [_HEAD]
    for path in command_paths(typer.main.get_command(app)):
        sections.append(f"## {' '.join(('vlfit', *path))}\n\n```text\n{_help_of(path)}\n```\n")
    return "\n".join(sections)


def command_paths(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command as the words that are typed for it, groups before their members."""
    members: dict[str, object] = getattr(command, "commands", {})
    return [
        path,
        *(each for name, member in members.items() for each in command_paths(member, (*path, name))),
    ]


def _help_of(path: tuple[str, ...]) -> str:
    from typer.testing import CliRunner

    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="vlfit", env=plain)
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


if __name__ == "__main__":
    print(help_page(), end="")
