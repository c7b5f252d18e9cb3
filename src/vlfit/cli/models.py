"""``vlfit models``, ``vlfit models rm`` and ``vlfit pull``: checkpoints on this computer."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import Options, takes

if TYPE_CHECKING:
    from vlfit.checkpoint.cache import LocalModel


models_app = typer.Typer(help="List or remove checkpoints on this computer.")


@models_app.callback(invoke_without_command=True)
@takes("json", json="Print a JSON list.")
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
    """What ``--json`` prints of a model."""
    fields = asdict(model) | {"folder": str(model.folder)}
    fields["sees"] = fields.pop("has_vision")
    return fields


def _print_table(found: "list[LocalModel]") -> None:
    from vlfit.checkpoint.source import MINI
    from vlfit.plan.model_lookup import SUGGESTION
    from vlfit.units import format_bytes

    rows = [("NAME", "SIZE", "FORMAT", "WHERE")]
    for model in found:
        label = model.format if model.complete else f"{model.format}, incomplete"
        rows.append((model.name, format_bytes(model.bytes), label, str(model.folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        typer.echo("  ".join((*cells, row[3])))
    for model in found:
        if not model.complete and model.name != MINI:
            typer.echo(f"finish the download: vlfit pull {model.name}", err=True)
    if all(model.name == MINI for model in found):
        typer.echo(f"a larger model: vlfit pull {SUGGESTION}", err=True)


@models_app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name as `vlfit models` prints it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a downloaded checkpoint. Asks first."""
    from vlfit.checkpoint.source import check_removable, remove_model
    from vlfit.units import format_bytes

    folder = check_removable(name)
    if not yes:
        # On stderr: stdout is for data.
        typer.confirm(f"Remove {name} ({folder})?", abort=True, err=True)
    freed = remove_model(name)
    typer.echo(f"removed {name}: {format_bytes(freed)} freed", err=True)


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, e.g. Qwen/Qwen3-VL-2B-Instruct-FP8, or ID@REVISION."),
    ],
) -> None:
    """Download a checkpoint from the hub and print its folder. Resumes a download that was cut off.

    Respects HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
    """
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import MINI, mini_folder, read_checkpoint
    from vlfit.units import format_bytes

    if model == MINI:
        typer.echo("mini ships with vlfit: nothing to download", err=True)
        typer.echo(str(mini_folder()))
        return
    # Reading checks every header, so that what is reported complete can be opened.
    checkpoint = read_checkpoint(model, hub.download(model))
    typer.echo(
        f"{model} is here: {checkpoint.parameter_count / 1e6:,.0f} million parameters, "
        f"{format_bytes(checkpoint.weight_bytes)} of {checkpoint.weights_format} weights",
        err=True,
    )
    typer.echo(str(checkpoint.folder))
