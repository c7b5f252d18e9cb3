"""A checkpoint in, the same model in fewer bits out, tensor by tensor.

From 16 bits, or from FP8 to less. Some rows of one tensor are in memory at a time, whatever the size of the
model. Norms, and what nobody asked to round (embedding, head, vision tower), keep their bytes.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vlfit.checkpoint.conversions import GROUP_SIZE
from vlfit.checkpoint.headers import INDEX_FILE
from vlfit.checkpoint.quantization import INT4
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
from vlfit.engine.convert.layout import Job, Shard, index, jobs, shards
from vlfit.engine.convert.recipe import (
    KEPT,
    Recipe,
    Wanted,
    kept_layers,
    new_recipe,
    quantization_config,
)
from vlfit.engine.convert.weights import Converter, Errors
from vlfit.engine.loader import Loader
from vlfit.units import GIB

GROUP_SIZES = (32, 64, 128)  # what the kernels of vLLM take
DEFAULT_GROUP_SIZE = GROUP_SIZE
DEFAULT_SHARD_BYTES = 4 * GIB

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def convert(
    checkpoint: Checkpoint,
    weights: str,
    target: Path,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    head: str = KEPT,
    embedding: str = KEPT,
    vision: str = KEPT,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write ``checkpoint`` to the folder ``target`` with its text layers in ``weights`` (``fp8``, ``int4``).

    ``head``: the output head's form, where it is not tied to the embedding (``16``, ``int8``, ``int4``);
    ``embedding`` and ``vision``: the table's and the tower's (``16``, ``int8``).

    ``target`` appears when all is written, or not at all. Raises ``UsageError`` for what cannot be made of
    this checkpoint (``new_recipe``) and a ``target`` that is taken (``replace`` takes the place of a
    checkpoint), and ``VlfitError`` when the disk is full or cannot be written.
    """
    started = time.perf_counter()
    wanted = Wanted(weights, group_size, head, embedding, vision)
    recipe = new_recipe(checkpoint, wanted)
    all_jobs = jobs(checkpoint, recipe)
    files = shards(all_jobs, shard_bytes)
    errors = Errors()
    try:
        with new_folder(target, checkpoint.folder, replace=replace) as folder:
            config = _config(checkpoint, recipe)
            listing = json.dumps(index(files), indent=2) + "\n" if len(files) > 1 else ""
            weight_bytes = sum(len(file.head) for file in files) + sum(job.bytes for job in all_jobs)
            check_disk(folder, weight_bytes + len(config + listing) + small_bytes(checkpoint.folder))
            _write_weights(checkpoint, files, folder, errors, progress)
            copy_small_files(checkpoint.folder, folder)
            if listing:
                write_text(folder / INDEX_FILE, listing)
            # Last: a folder without it is no checkpoint to anybody.
            write_text(folder / "config.json", config)
            read_checkpoint(target.name, folder)  # what cannot be opened again is not handed out
            done = _account(checkpoint, wanted, recipe, target, all_jobs, errors, started)
            write_text(folder / "README.md", card(done))
    except OSError as error:
        raise cannot_write(target, error) from error
    return done


def _account(
    checkpoint: Checkpoint,
    wanted: Wanted,
    recipe: Recipe,
    target: Path,
    all_jobs: list[Job],
    errors: Errors,
    started: float,
) -> Conversion:
    stay_fp8 = sum(job.source.count for job in all_jobs if job.stays_fp8)
    return Conversion(
        source=checkpoint.name,
        source_weights=checkpoint.weights_format,
        folder=target,
        weights=wanted.weights,
        bytes_before=checkpoint.weight_bytes,
        bytes_after=sum(job.bytes for job in all_jobs),
        parameters=checkpoint.parameter_count,
        converted_parameters=stay_fp8 + sum(job.source.count for job in all_jobs if job.form),
        group_size=wanted.group_size if wanted.weights == INT4 else None,
        head=wanted.head,
        embedding=wanted.embedding,
        vision=wanted.vision,
        kept=tuple(kept_layers(checkpoint, recipe)),
        relative_errors=errors.relative(),
        nearest_errors=errors.relative_of_nearest(),
        seconds=time.perf_counter() - started,
    )


def _write_weights(
    checkpoint: Checkpoint,
    files: list[Shard],
    folder: Path,
    errors: Errors,
    progress: Progress | None,
) -> None:
    total, read = checkpoint.weight_bytes, 0
    with (
        Loader(checkpoint, torch.device("cpu"), torch.float32) as loader,
        Converter(loader, errors) as converter,
    ):
        for shard in files:
            with ShardWriter(folder, shard) as writer:
                for job in shard.jobs:
                    converter.convert(job, writer)
                    read += job.bytes_read
                    if progress:
                        progress(read, total)


def _config(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """config.json as it was, with a word about the weights."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(checkpoint, recipe)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
