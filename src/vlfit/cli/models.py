"""``vlfit models``, ``vlfit models rm`` and ``vlfit pull``: checkpoints on this computer.

And what every other command does with the name of a model: find it, or ask before it is downloaded.
"""

import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import CommandOptions, complete_model, complete_removable, takes_options
from vlfit.cli.printing import Printer, escape_control, terminal_width, wrap
from vlfit.cli.signals import is_interrupt
from vlfit.errors import NotDownloaded, VlfitError
from vlfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlfit.checkpoint.cache import LocalModel
    from vlfit.checkpoint.gguf.places import Search
    from vlfit.checkpoint.hub import FileSelection
    from vlfit.checkpoint.removal import Removable
    from vlfit.checkpoint.source import ResolvedModel
    from vlfit.loading.kernel_build import KernelBuild
    from vlfit.plan.gguf_shelf import ShelvedModel
    from vlfit.plan.plans import Plan
    from vlfit.plan.quantizations import RepositoryPlans

_LINE_BITS_PER_S = 100_000_000  # of the connection that a download's time is stated for
_YES = ("1", "true", "yes", "on")
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|Mbit/s|min|m?s)\b)|(?<=\bmin) (?=\d)")  # the spaces
_SHOWN_FILES = 4  # in a question
_RIGHT_ALIGNED = ("SIZE", "size", "left MiB", "context", "tokens/s", "KLD")


def resolve_or_ask(
    model: str,
    printer: Printer,
    *,
    yes: bool,
    backend: str = "native",
    files: "FileSelection | None" = None,
    device: str | None = None,
) -> str:
    """Return the name to open ``model`` by; if it must be downloaded, ask on the terminal, unless ``yes``.

    Downloads nothing itself. A name without a weights format (``4B``) becomes that of one checkpoint
    (``resolve_to_one``). ``files``: those that must be here; None: what the native engine reads. ``device``:
    ``cpu`` to choose the format for the processor, whatever cards there are.

    Raises ``NotDownloaded``, with the command to type, if the answer is no or there is no terminal;
    ``HubError`` if nothing may be downloaded or the disk has too little room; and what ``resolve_name``
    raises.
    """
    from vlfit.checkpoint import hub

    one = resolve_to_one(model, printer, backend=backend, files=files, device=device)
    selection = hub.NATIVE if files is None else files
    if one.on_hub and not yes and one.local_folder(selection) is None:
        _ask_to_download(model, one, selection)
    return opening_name(model, one)


def opening_name(model: str, one: "ResolvedModel") -> str:
    """The name to open ``one`` by, to which ``model``, as typed, was resolved.

    The path of its folder if ``model`` was another name of a checkpoint in a folder, such as its path.
    """
    from vlfit.checkpoint.gguf.file_names import split_mmproj, with_mmproj
    from vlfit.checkpoint.source import MINI

    if one.is_gguf:  # ``ollama:qwen3-vl:4b`` is its name, ``model.gguf`` a path
        name = one.name if ":" in one.name or one.folder is None else str(one.folder)
        return with_mmproj(name, split_mmproj(model)[1])

    return one.name if one.folder is None or one.name in (MINI, model) else str(one.folder)


def resolve_to_one(
    model: str,
    printer: Printer,
    *,
    backend: str = "native",
    files: "FileSelection | None" = None,
    device: str | None = None,
) -> "ResolvedModel":
    """The checkpoint that ``model`` means; if the name leaves its format open, the best that fits here.

    Prints a note which one it took in that case. ``backend``: to fit on. ``files``, ``device``: as for
    ``resolve_or_ask``.
    """
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import resolve_name

    found = resolve_name(model)
    if len(found) == 1:
        return _with_type(found[0], printer, device)
    from vlfit.machine.survey import survey
    from vlfit.plan.model_choice import WITHOUT_GPU, choose_format
    from vlfit.plan.processors import for_device
    from vlfit.plan.wishes import Wishes

    wishes = Wishes(backend=backend) if backend == "vllm" else Wishes()
    machine = for_device(survey(), device)
    one = choose_format(found, machine, wishes, hub.NATIVE if files is None else files)
    why = "the best of its formats for this computer"
    if one.is_gguf:
        why = "the one here whose plan ranks first" if machine.gpus else WITHOUT_GPU
    text = f"{model.strip()}: taking {one.name}, {why}"
    printer.note(wrap(text, on_terminal=sys.stderr.isatty()))
    return one


def _with_type(one: "ResolvedModel", printer: Printer, device: str | None) -> "ResolvedModel":
    """``one``; if it is a repository of GGUF files that is not here, its quantization for this computer."""
    from vlfit.checkpoint.gguf.repository import may_be_gguf
    from vlfit.checkpoint.source import nearest_names_in_hint, resolve_name

    if one.folder is not None or one.is_gguf or not may_be_gguf(one.name) or one.local_folder() is not None:
        return one
    from vlfit.machine.survey import survey
    from vlfit.plan.processors import for_device
    from vlfit.plan.quantizations import choose_quantization

    with nearest_names_in_hint(one.name):
        name, why = choose_quantization(one.name, for_device(survey(), device))
    printer.note(f"{one.name} means {name} on this computer: {why}")
    (found,) = resolve_name(name)
    return found


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
    from vlfit.checkpoint.gguf import repository
    from vlfit.checkpoint.source import nearest_names_in_hint

    command = f"vlfit pull {shlex.quote(model)}"
    if constants.HF_HUB_OFFLINE:
        if one.is_gguf:
            repository.download(one.name)
        hub.ensure_downloaded(one.name, None, files)  # raises the error of a hub that may not be asked
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        groups = one.entry.tensor_groups if one.entry is not None else ()
        size = sum(group.example.bytes * len(group.names) for group in groups)
        # What is in the cache of ``org/name@revision`` may be of another revision, of a GGUF of another type.
        is_partial = "@" not in one.name and not one.is_gguf and hub.cached_bytes(one.name) > 0
        weights = f" ({format_bytes(size)} of weights)" if size else ""
        raise NotDownloaded(
            f"{one.name} is {'only partly' if is_partial else 'not'} on this computer{weights}",
            f"Download it: {command} (or repeat this command with --yes, or with VLFIT_YES=1).",
        )
    with nearest_names_in_hint(one.name):
        total, here = (
            repository.download_size(one.name) if one.is_gguf else hub.download_size(one.name, files)
        )
    hub.check_disk_space(max(total - here, 0))
    _describe_download(one.name, total, here)
    _confirm_download(one.name, command)


def _describe_download(name: str, total: int, here: int, verdict: str = "") -> None:
    """Say on stderr what a download of ``total`` bytes takes, of which ``here`` are in the cache."""
    from vlfit.checkpoint import hub
    from vlfit.units import format_bytes, format_seconds

    seconds = (total - here) * 8 / _LINE_BITS_PER_S
    resumed = f", of which {format_bytes(here)} are here already" if here else ""
    text = (
        f"{name} is not on this computer: {format_bytes(total)} to download{resumed}; "
        f"{format_seconds(seconds)} at {_LINE_BITS_PER_S // 1_000_000} Mbit/s; "
        f"{format_bytes(hub.free_disk_bytes())} of disk are free"
    )
    for line in (text, *([f"vlfit plan recommends it: it {verdict}"] if verdict else [])):
        # No line ends between a number and its unit.
        whole = _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", line)
        typer.echo(wrap(whole).replace("\N{NO-BREAK SPACE}", " "), err=True)


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
    every: Annotated[
        bool, typer.Option("--all", help="Look at every GGUF file, however long that takes.")
    ] = False,
    *,
    options: CommandOptions,
) -> None:
    """List the checkpoints on this computer: name, size, weights format, folder.

    And the GGUF models of Ollama, LM Studio, llama.cpp and the hub's cache, with what fits this computer.
    """
    if context.invoked_subcommand is not None:
        return
    from vlfit.checkpoint.gguf.places import Search
    from vlfit.checkpoint.source import local_models
    from vlfit.machine.survey import survey
    from vlfit.plan.gguf_shelf import shelved_models, shelved_to_json

    search = Search(bounded=not every)
    found, shelf = local_models(), shelved_models(survey(), search)
    if options.json:
        facts = [*map(_facts, found), *map(shelved_to_json, shelf)]
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print_table(found, suggest=not shelf)
        _print_shelf(shelf)
    _say_what_is_left(shelf, search)


def _facts(model: "LocalModel") -> dict[str, Any]:
    """A model as ``--json`` prints it."""
    fields = asdict(model) | {"folder": str(model.folder)}
    fields["sees"] = fields.pop("has_vision")
    return fields


def _print_table(found: "list[LocalModel]", *, suggest: bool) -> None:
    """``suggest``: name a larger model to download if only mini is here."""
    from vlfit.checkpoint import store
    from vlfit.checkpoint.source import MINI

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
            command = store.convert_command(model.folder)
            text = (
                f"convert it again: {command}" if command else f"finish the download: vlfit pull {model.name}"
            )
            typer.echo(text, err=True)
    if suggest and all(model.name == MINI for model in found):
        from vlfit.plan.model_choice import recommend_download
        from vlfit.plan.processors import this_computer

        download = recommend_download(this_computer())
        if download is not None:
            typer.echo(f"a larger model: {download.command} ({download.verdict})", err=True)


# --- tables of GGUF models ---------------------------------------------------------------------------------


def _print_shelf(models: "Sequence[ShelvedModel]") -> None:
    """Print the GGUF models on this computer as a table; nothing if there are none."""
    if not models:
        return
    rows = [("GGUF", "SIZE", "TYPE", "MODEL", "PICTURES", "FITS")]
    for each in models:
        unknown = "-" if each.looked_at else "?"
        rows.append(
            (
                escape_control(each.found.name, terminal=True),
                format_bytes(each.found.bytes),
                each.type or unknown,
                escape_control(each.architecture, terminal=True) or unknown,
                {True: "yes", False: "no", None: unknown}[each.has_vision],
                escape_control(_fits(each), terminal=True),
            )
        )
        shown = rows[-1][0]
        for alias in each.found.aliases:
            rows.append((escape_control(alias, terminal=True), "", "", "", "", f"the same files as {shown}"))
    typer.echo("")
    for line in _table(rows):
        typer.echo(line)


def _say_what_is_left(models: "Sequence[ShelvedModel]", search: "Search") -> None:
    """Say on stderr what time was over for, and how to see it."""
    from vlfit.checkpoint.gguf import places
    from vlfit.plan import gguf_shelf

    count = sum(not each.looked_at for each in models)
    if count:
        typer.echo(
            f"{count} of {len(models)} GGUF models were not looked at: the {gguf_shelf.MAX_SECONDS:g} s for "
            "that were over. vlfit models --all takes the time; vlfit plan NAME looks at one",
            err=True,
        )
    for place in search.left:
        typer.echo(
            f"{escape_control(str(place), terminal=True)} was not listed to its end: that takes more than "
            f"{places.MAX_SECONDS:g} s, or it has more than {places.MAX_ENTRIES:,} files. vlfit models --all "
            "lists everything",
            err=True,
        )


def _fits(each: "ShelvedModel") -> str:
    if not each.looked_at:
        return "not looked at: time was over"
    if each.problem:
        return f"not run: {each.problem}"
    why = each.model.without_tower if each.model is not None else ""
    blind = f"; text only, as {why}" if why else ""
    if each.headroom is None:
        return f"no GPU to plan for{blind}"
    left = f"{abs(each.headroom) / MIB:,.0f} MiB"
    return f"yes, {left} left{blind}" if each.headroom >= 0 else f"no, {left} short{blind}"


def repository_table(plans: "RepositoryPlans") -> str:
    """All quantizations of a repository, the largest first, the recommended one marked with ``*``."""
    rows: list[tuple[str, ...]] = [("", "type", "size", "left MiB", "context", "tokens/s", "KLD")]
    notes = []
    for each in plans.quantizations:
        plan = each.plan
        mark = "*" if plan is not None and plan is plans.best and plan.fits else " "
        kld = "" if each.kld is None else f"{each.kld.mean:g}"
        rows.append((mark, each.type, format_bytes(each.download), *_numbers(plan), kld))
        if plan is None:
            notes.append(f"{each.type} is not run: {each.problem}")
    sources = dict.fromkeys(each.kld.source for each in plans.quantizations if each.kld is not None)
    notes += [f"KLD: mean divergence from the bf16 model, published at {source}." for source in sources]
    if not sources:
        rows = [row[:-1] for row in rows]
    lines = [*_table(rows), *(wrap(escape_control(note, terminal=True), "") for note in notes)]
    return "\n".join(lines)


def _numbers(plan: "Plan | None") -> tuple[str, str, str]:
    """What is left, context, tokens per second."""
    if plan is None:
        return "-", "-", "-"
    speed = "-" if plan.speed is None else f"{plan.speed.decode.expected:.0f}"
    context = str(plan.settings.context) if plan.fits else "-"
    return f"{plan.headroom / MIB:,.0f}", context, speed if plan.fits else "-"


def _table(rows: "Sequence[tuple[str, ...]]") -> list[str]:
    """Lines of a table; in a narrow terminal each row's last column on a line of its own."""
    heads = rows[0]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    right = [head in _RIGHT_ALIGNED for head in heads]

    def line(row: tuple[str, ...], columns: int) -> str:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row[:columns], widths, right, strict=False)
        ]
        return "  ".join(cells).rstrip()

    whole = [line(row, len(row)) for row in rows]
    widest = max(map(len, whole))
    if widest <= terminal_width(widest):
        return whole
    found = []
    for row in rows:
        found.append(wrap(" ".join(cell for cell in row[1:-1] if cell), f"{row[0]}  "))
        found.append(wrap(row[-1], "  "))
    return found


@models_app.command("rm")
def remove(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_removable,
            help="A name as `vlfit models` prints it; org/name-GGUF:TYPE for one of several types.",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a downloaded or converted checkpoint, or one type of its GGUF files. Asks first.

    The vision tower (mmproj) goes with the last type. Other programs' models are theirs to remove.
    """
    from vlfit.checkpoint.removal import find_removable, remove

    removable = find_removable(name)
    if not (yes or os.environ.get("VLFIT_YES", "").lower() in _YES):
        try:
            # On stderr: stdout is for data.
            typer.confirm(f"Remove {name} ({_described(removable)})?", abort=True, err=True)
        except typer.Abort as abort:
            if sys.stdin.isatty() or is_interrupt(abort):
                raise
            typer.echo(err=True)  # ends the question's line
            raise VlfitError(
                f"{name} was not removed: nobody said yes",
                "Without a terminal: repeat with --yes, or with VLFIT_YES=1.",
            ) from None
    freed = remove(removable)
    typer.echo(f"removed {name}: {format_bytes(freed)} freed", err=True)


def _described(removable: "Removable") -> str:
    """What will be removed: the folder, or names of files in it."""
    names = [escape_control(path.name, terminal=True) for path in removable.files]
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return (
        f"{', '.join(names[:_SHOWN_FILES])}{more} in {removable.folder}" if names else str(removable.folder)
    )


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="4B, 4B-FP8, a hub id such as Qwen/Qwen3-VL-2B-Instruct-FP8 or ID@REVISION, or its address;"
            " of GGUF files ID:TYPE, such as unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M.",
        ),
    ],
    yes: Annotated[  # as `vlfit caption` takes it; scripts pass it to both
        bool, typer.Option("--yes", "-y", hidden=True, help="Nothing is asked anyway.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Then verify it on this computer, as vlfit verify MODEL --quick does."),
    ] = False,
) -> None:
    """Download a checkpoint from the hub and print its folder. Resumes a download that was cut off.

    4B, without a weights format, is the one that vlfit plan 4B ranks first of those that the hub has; a
    repository of GGUF files without a type likewise. The vision tower (mmproj) comes with a GGUF model.
    With a GPU here, its kernels for that card are compiled meanwhile. Respects HF_HOME, HF_ENDPOINT, HF_TOKEN
    and HF_HUB_OFFLINE. With --verify the report is on stderr, and exit code 1 means that something differs.
    """
    name, path = _pull(model)
    typer.echo(path)
    if verify:
        _verify_pulled(name)


def _pull(model: str) -> tuple[str, str]:
    """Download ``model``; return the name to open it by, and its folder or file."""
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.headers import read_headers
    from vlfit.checkpoint.source import MINI, locate_or_download, nearest_names_in_hint, read_checkpoint

    one = resolve_to_one(model, Printer())
    if not one.on_hub:
        name, folder = locate_or_download(opening_name(model, one))
        if not one.is_gguf:
            read_headers(folder)  # raises: a file of it is broken, and the hint says what repairs it
        where = "ships with vlfit" if one.name == MINI else "is on this computer"
        typer.echo(f"{name} {where}: nothing to download", err=True)
        return opening_name(model, one), str(one.folder if one.is_gguf else folder)
    from vlfit.loading.kernel_build import start_build_for_pull
    from vlfit.plan.gpus import check_gpus

    try:
        check_gpus("auto")
    except VlfitError as error:  # the files may be for another computer, or for its processor
        typer.echo(f"warning: {error.message}. {error.hint}", err=True)
    if one.is_gguf:
        return one.name, _pull_gguf(one.name)
    kernels = start_build_for_pull(one.name)
    try:
        with nearest_names_in_hint(one.name):
            folder = hub.download(one.name)
        # Reading checks every header, so that what is reported complete can be opened.
        checkpoint = read_checkpoint(one.name, folder)
        typer.echo(
            f"{one.name} is here: {checkpoint.parameter_count / 1e6:,.0f} million parameters, "
            f"{format_bytes(checkpoint.weight_bytes)} of {checkpoint.weights_format} weights",
            err=True,
        )
        _finish_kernels(kernels)
    finally:
        if kernels is not None:
            kernels.stop()
    return one.name, str(checkpoint.folder)


def _verify_pulled(name: str) -> None:
    """Verify the model ``name`` in short. The report goes to stderr, as stdout has the folder.

    Raises ``typer.Exit`` if something differs, and what loading the model raises.
    """
    from vlfit.cli.verify_here import report_text, verify_here, verify_options
    from vlfit.settings import read_settings

    command = f"vlfit verify {shlex.quote(name)}"
    try:
        result = verify_here(name, verify_options(read_settings()), "quick", Printer())
    except VlfitError:
        typer.echo(f"{name} is here, but it was not verified. Later: {command}", err=True)
        raise
    typer.echo(report_text(result), err=True)
    if not result.report.ok:
        typer.echo(f"more of it: {command} --json", err=True)
        raise typer.Exit(1)


def _finish_kernels(kernels: "KernelBuild | None") -> None:
    """Wait for the kernels of a model that is here now, and say so. None: there is nothing to wait for."""
    if kernels is None:
        return
    if kernels.running:
        typer.echo("compiling kernels for this card; Ctrl-C leaves them to the first start", err=True)
    if kernels.wait():
        typer.echo("its kernels are compiled: the first start is as fast as later ones", err=True)
    else:
        typer.echo(f"its kernels are compiled at the first start: {kernels.failure}", err=True)


def _pull_gguf(name: str) -> str:
    """Download ``org/name:TYPE`` and its mmproj, and return the path of the model's file."""
    from vlfit.checkpoint.gguf import repository
    from vlfit.checkpoint.source import locate_or_download, nearest_names_in_hint, read_checkpoint
    from vlfit.loading.kernel_build import start_build_for_pull

    with nearest_names_in_hint(name):
        found = repository.download(name)
    checkpoint = read_checkpoint(*locate_or_download(name))
    kernels = start_build_for_pull(str(found.path))  # which ones follows from the file
    tower = "no vision tower" if found.mmproj is None else f"vision tower in {found.mmproj.name}"
    typer.echo(
        f"{found.name} is here: {checkpoint.parameter_count / 1e6:,.0f} million parameters, "
        f"{format_bytes(found.bytes)}, {tower}",
        err=True,
    )
    try:
        _finish_kernels(kernels)
    finally:
        if kernels is not None:
            kernels.stop()
    return str(found.path)
