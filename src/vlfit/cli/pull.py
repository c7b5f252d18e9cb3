"""``vlfit pull``: fetch a checkpoint from the model hub, or go on with a download that was cut off."""

from typing import Annotated

import typer


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Name on the hub, such as Qwen/Qwen3-VL-2B-Instruct-FP8, or NAME@REVISION."
        ),
    ],
) -> None:
    """Download a checkpoint. Prints its folder; a download that was cut off goes on where it stopped.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to all tools of the hub.
    """
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.source import MINI, mini_folder, read_checkpoint
    from vlfit.units import format_bytes

    if model == MINI:
        typer.echo("mini is part of vlfit: there is nothing to download", err=True)
        typer.echo(str(mini_folder()))
        return
    # Also checks every header: a checkpoint that is reported as here can be opened.
    checkpoint = read_checkpoint(model, hub.download(model))
    typer.echo(
        f"{model} is here: {checkpoint.parameter_count / 1e6:,.0f} million parameters, "
        f"{format_bytes(checkpoint.weight_bytes)} of {checkpoint.weights_format} weights",
        err=True,
    )
    typer.echo(str(checkpoint.folder))
