"""``vlfit models``, ``vlfit models rm`` and ``vlfit pull``: checkpoints on this computer.

And what every other command does with the name of a model: find it, or ask before it is downloaded.
"""

import json
import os
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import Options, complete_model, takes_options
from vlfit.cli.printing import Printer, terminal_width, wrap
from vlfit.errors import NotDownloaded

if TYPE_CHECKING:
    from vlfit.checkpoint.cache import LocalModel
    from vlfit.checkpoint.hub import FileSelection
    from vlfit.checkpoint.source import ResolvedModel

_LINE_BITS_PER_S = 100_000_000  # of the connection that a download's time is stated for
_YES = ("1", "true", "yes", "on")


def resolve_or_ask(
    model: str,
    printer: Printer,
    *,
    yes: bool,
    backend: str = "native",
    files: "FileSelection | None" = None,
) -> str:
    """Return the name to open ``model`` by; if it must be downloaded, ask on the terminal, unless ``yes``.

    Downloads nothing itself. A name without a weights format (``4B``) becomes that of one checkpoint
    (``resolve_to_one``). ``files``: those that must be here; None: what the native engine reads. Raises
    ``NotDownloaded``, with the command to type, if the answer is no or there is no terminal; ``HubError`` if
    nothing may be downloaded or the disk has too little room; and what ``resolve_name`` raises.
    """
    from vlfit.checkpoint import hub

    one = resolve_to_one(model, printer, backend=backend, files=files)
    selection = hub.NATIVE if files is None else files
    if one.on_hub and not yes and hub.cached_folder(one.name, selection) is None:
        _ask_to_download(model, one, selection)
    return opening_name(model, one)


def opening_name(model: str, one: "ResolvedModel") -> str:
    """The name to open ``one`` by, to which ``model``, as typed, was resolved.

    The path of its folder if ``model`` was another name of a checkpoint in a folder, such as its path.
    """
    from vlfit.checkpoint.source import MINI

    return one.name if one.folder is None or one.name in (MINI, model) else str(one.folder)


def resolve_to_one(
    model: str, printer: Printer, *, backend: str = "native", files: "FileSelection | None" = None
) -> "ResolvedModel":
    """The checkpoint that ``model`` means; if the name leaves its format open, the best that fits here.

    Prints a note which one it took in that case. ``backend``: to fit on. ``files``: as for
    ``resolve_or_ask``.
    """
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import resolve_name

    found = resolve_name(model)
    if len(found) == 1:
        return found[0]
    from vlfit.machine.survey import survey
    from vlfit.plan.model_choice import choose_format
    from vlfit.plan.wishes import Wishes

    wishes = Wishes(backend=backend) if backend == "vllm" else Wishes()
    one = choose_format(found, survey(), wishes, hub.NATIVE if files is None else files)
    printer.note(f"{model.strip()} means {one.name} on this computer")
    return one


def ask_to_download(name: str, weight_bytes: int, verdict: str, *, yes: bool) -> None:
    """Raise ``NotDownloaded`` unless a person at a terminal agrees to download ``name``; uses no network.

    ``weight_bytes``: of its weights, by the catalog. ``verdict``: how it fits this computer, a phrase.
    ``yes``: do not ask. Raises ``HubError`` if nothing may be downloaded, or the disk has too little room.
    """
    from huggingface_hub import constants

    from vlfit.checkpoint import hub

    if constants.HF_HUB_OFFLINE:
        hub.ensure_downloaded(name)  # raises
    here = hub.cached_bytes(name)
    hub.check_disk_space(max(weight_bytes - here, 0))
    _describe_download(name, max(weight_bytes, here), here, verdict)
    if not yes:
        _confirm_download(name, f"vlfit pull {shlex.quote(name)}")


def _ask_to_download(model: str, one: "ResolvedModel", files: "FileSelection") -> None:
    """Raise ``NotDownloaded`` unless a person at a terminal agrees to download ``one``."""
    from huggingface_hub import constants

    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import nearest_names_in_hint
    from vlfit.units import format_bytes

    command = f"vlfit pull {shlex.quote(model)}"
    if constants.HF_HUB_OFFLINE:
        hub.ensure_downloaded(one.name, None, files)  # raises the error of a hub that may not be asked
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        groups = one.entry.tensor_groups if one.entry is not None else ()
        size = sum(group.example.bytes * len(group.names) for group in groups)
        # What is in the cache of ``org/name@revision`` may be of another revision.
        is_partial = "@" not in one.name and hub.cached_bytes(one.name) > 0
        weights = f" ({format_bytes(size)} of weights)" if size else ""
        raise NotDownloaded(
            f"{one.name} is {'only partly' if is_partial else 'not'} on this computer{weights}",
            f"Download it: {command} (or add --yes, or VLFIT_YES=1).",
        )
    with nearest_names_in_hint(one.name):
        total, here = hub.download_size(one.name, files)
    hub.check_disk_space(max(total - here, 0))
    _describe_download(one.name, total, here)
    _confirm_download(one.name, command)


def _describe_download(name: str, total: int, here: int, verdict: str = "") -> None:
    """Say on stderr what a download of ``total`` bytes takes, of which ``here`` are in the cache."""
    from vlfit.checkpoint import hub
    from vlfit.units import format_bytes, format_seconds

    seconds = (total - here) * 8 / _LINE_BITS_PER_S
    resumed = f", of which {format_bytes(here)} are here already" if here else ""
    typer.echo(
        f"{name} is not on this computer: {format_bytes(total)} to download{resumed}; "
        f"{format_seconds(seconds)} at {_LINE_BITS_PER_S // 1_000_000} Mbit/s; "
        f"{format_bytes(hub.free_disk_bytes())} of disk are free",
        err=True,
    )
    if verdict:
        typer.echo(f"vlfit plan recommends it: it {verdict}", err=True)


def _confirm_download(name: str, command: str) -> None:
    """Ask on the terminal. Raises ``NotDownloaded``, with ``command`` for later, unless the answer is yes."""
    # click's confirm would print a space on stdout, which is for data.
    typer.echo("Download it now? [Y/n] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer or answer.strip().lower() not in ("", "y", "yes"):
        raise NotDownloaded(f"{name} was not downloaded", f"Later: {command}")


models_app = typer.Typer(help="List or remove checkpoints on this computer.")


@models_app.callback(invoke_without_command=True)
@takes_options("json", json="Print a JSON list.")
def models(
    context: typer.Context,
    *,
    options: Options,
) -> None:
    """List the checkpoints on this computer: name, size, weights format, folder."""
    if context.invoked_subcommand is not None:
        return
    from vlfit.checkpoint.source import local_models

    found = local_models()
    if options.json:
        typer.echo(json.dumps([_facts(model) for model in found], ensure_ascii=False))
    else:
        _print_table(found)


def _facts(model: "LocalModel") -> dict[str, Any]:
    """A model as ``--json`` prints it."""
    fields = asdict(model) | {"folder": str(model.folder)}
    fields["sees"] = fields.pop("has_vision")
    return fields


def _print_table(found: "list[LocalModel]") -> None:
    from vlfit.checkpoint.source import MINI
    from vlfit.units import format_bytes

    rows = [("NAME", "SIZE", "FORMAT", "WHERE")]
    for model in found:
        label = model.format if model.complete else f"{model.format}, incomplete"
        rows.append((model.name, format_bytes(model.bytes), label, str(model.folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join((*map(str.ljust, row[:3], widths), row[3])) for row in rows]
    widest = max(map(len, lines))
    if widest <= terminal_width(widest):
        typer.echo("\n".join(lines))
    else:  # the folder below its model
        for name, size, label, where in rows:
            typer.echo(wrap(f"{size}  {label}", f"{name.ljust(widths[0])}  "))
            typer.echo(wrap(where, "  "))
    for model in found:
        if not model.complete and model.name != MINI:
            typer.echo(f"finish the download: vlfit pull {model.name}", err=True)
    if all(model.name == MINI for model in found):
        from vlfit.machine.survey import survey
        from vlfit.plan.model_choice import recommend_download

        download = recommend_download(survey())
        if download is not None:
            typer.echo(f"a larger model: {download.command} ({download.verdict})", err=True)


@models_app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name as `vlfit models` prints it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a downloaded or converted checkpoint. Asks first."""
    from vlfit.checkpoint.source import removable_folder, remove_model
    from vlfit.units import format_bytes

    folder = removable_folder(name)
    if not (yes or os.environ.get("VLFIT_YES", "").lower() in _YES):
        # On stderr: stdout is for data.
        typer.confirm(f"Remove {name} ({folder})?", abort=True, err=True)
    freed = remove_model(name)
    typer.echo(f"removed {name}: {format_bytes(freed)} freed", err=True)


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="4B, 4B-FP8, a hub id such as Qwen/Qwen3-VL-2B-Instruct-FP8 or ID@REVISION, or its address.",
        ),
    ],
) -> None:
    """Download a checkpoint from the hub and print its folder. Resumes a download that was cut off.

    4B, without a weights format, is the one that vlfit plan 4B ranks first of those that the hub has.
    Respects HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
    """
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import MINI, locate_or_download, nearest_names_in_hint, read_checkpoint
    from vlfit.units import format_bytes

    one = resolve_to_one(model, Printer())
    if not one.on_hub:
        name, folder = locate_or_download(one.name if one.folder is None else one.folder)
        where = "ships with vlfit" if one.name == MINI else "is on this computer"
        typer.echo(f"{name} {where}: nothing to download", err=True)
        typer.echo(str(folder))
        return
    with nearest_names_in_hint(one.name):
        folder = hub.download(one.name)
    # Reading checks every header, so that what is reported complete can be opened.
    checkpoint = read_checkpoint(one.name, folder)
    typer.echo(
        f"{one.name} is here: {checkpoint.parameter_count / 1e6:,.0f} million parameters, "
        f"{format_bytes(checkpoint.weight_bytes)} of {checkpoint.weights_format} weights",
        err=True,
    )
    typer.echo(str(checkpoint.folder))
