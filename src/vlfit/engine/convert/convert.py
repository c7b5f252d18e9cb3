"""A checkpoint with 16-bit weights in, the same model in FP8 or int4 out, tensor by tensor.

Some rows of one tensor are in memory at a time, whatever the size of the model. Embeddings, head, norms and
the vision tower keep their bytes, as in the official FP8 checkpoints: few weights, where bits matter most.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vlfit.checkpoint.headers import INDEX_FILE
from vlfit.checkpoint.quantization import FP8, INT4, Fp8Format, WeightScheme
from vlfit.checkpoint.source import Checkpoint, read_checkpoint
from vlfit.engine.convert.card import Conversion, card
from vlfit.engine.convert.files import (
    ShardWriter,
    cannot_write,
    check_disk,
    copy_small_files,
    new_folder,
    small_bytes,
    write_text,
)
from vlfit.engine.convert.layout import (
    Job,
    Recipe,
    Shard,
    index,
    jobs,
    kept_layers,
    new_recipe,
    quantization_config,
    shards,
)
from vlfit.engine.convert.weights import Converter, Errors
from vlfit.engine.loader import Loader
from vlfit.units import GIB

GROUP_SIZES = (32, 64, 128)  # what the kernels of vLLM take
DEFAULT_GROUP_SIZE = 32
DEFAULT_SHARD_BYTES = 4 * GIB

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def convert(
    checkpoint: Checkpoint,
    weights: str,
    target: Path,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    head: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write ``checkpoint`` to the folder ``target`` with its text layers in ``weights`` (``fp8``, ``int4``).

    ``head``: the output head too (int4 only, where it is not tied to the embedding).

    ``target`` appears when all is written, or not at all. Raises ``UsageError`` for a checkpoint that is
    converted already and a ``target`` that is taken (``replace`` takes the place of a checkpoint), and
    ``VlfitError`` when the disk is full or cannot be written.
    """
    started = time.perf_counter()
    recipe = new_recipe(checkpoint, weights, group_size, head=head)
    all_jobs = jobs(checkpoint, recipe)
    files = shards(all_jobs, shard_bytes)
    errors = Errors()
    try:
        with new_folder(target, checkpoint.folder, replace=replace) as folder:
            config = _config(checkpoint, recipe)
            listing = json.dumps(index(files), indent=2) + "\n" if len(files) > 1 else ""
            weight_bytes = sum(len(file.head) for file in files) + sum(job.bytes for job in all_jobs)
            check_disk(folder, weight_bytes + len(config + listing) + small_bytes(checkpoint.folder))
            _write_weights(checkpoint, recipe.form, files, folder, errors, progress)
            copy_small_files(checkpoint.folder, folder)
            if listing:
                write_text(folder / INDEX_FILE, listing)
            # Last: a folder without it is no checkpoint to anybody.
            write_text(folder / "config.json", config)
            read_checkpoint(target.name, folder)  # what cannot be opened again is not handed out
            done = _account(checkpoint, recipe, target, all_jobs, errors, time.perf_counter() - started)
            write_text(folder / "README.md", card(done))
    except OSError as error:
        raise cannot_write(target, error) from error
    return done


def _account(
    checkpoint: Checkpoint,
    recipe: Recipe,
    target: Path,
    all_jobs: list[Job],
    errors: Errors,
    seconds: float,
) -> Conversion:
    form = recipe.form
    return Conversion(
        source=checkpoint.name,
        folder=target,
        weights=FP8 if isinstance(form, Fp8Format) else INT4,
        bytes_before=checkpoint.weight_bytes,
        bytes_after=sum(job.bytes for job in all_jobs),
        parameters=checkpoint.parameter_count,
        converted_parameters=sum(job.source.count for job in all_jobs if job.converted),
        group_size=form.group_size if isinstance(form, WeightScheme) else None,
        head=recipe.head,
        kept=tuple(kept_layers(checkpoint, recipe)),
        relative_errors=errors.relative(),
        seconds=seconds,
    )


def _write_weights(
    checkpoint: Checkpoint,
    form: Fp8Format | WeightScheme,
    files: list[Shard],
    folder: Path,
    errors: Errors,
    progress: Progress | None,
) -> None:
    total, read = checkpoint.weight_bytes, 0
    with (
        Loader(checkpoint, torch.device("cpu"), torch.float32) as loader,
        Converter(loader, form, errors) as converter,
    ):
        for shard in files:
            with ShardWriter(folder, shard) as writer:
                for job in shard.jobs:
                    if job.converted:
                        converter.convert(job, writer)
                    else:
                        writer.copy(job.source)
                    read += job.source.bytes
                    if progress:
                        progress(read, total)


def _config(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """config.json as it was, with a word about the weights."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(checkpoint, recipe)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
