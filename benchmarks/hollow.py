"""Checkpoints of the true sizes of 2B, 4B and 8B that take no room: real headers, and holes for weights.

What a process holds does not depend on the values of weights, only on names, types and shapes. Those are the
published files' own, or what ``vlfit convert`` writes for int4. The bytes are a hole in the file, which reads
as zeros. Tokenizer, template and control tokens are mini's. Does not know how memory is measured.
"""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import BORROWED
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo
from vlfit.checkpoint.quantization import INT8
from vlfit.checkpoint.source import Checkpoint, mini_folder
from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE
from vlfit.quantize.output_files import OutputTensor, TensorConversion, plan_shards, plan_tensors
from vlfit.quantize.recipe import UNCHANGED, ConversionOptions, new_recipe, quantization_config

_ALL_IN_ONE_FILE = 2**60
_PIXELS = {"shortest_edge": 65536, "longest_edge": 16777216}  # areas, as in the official files


def write_hollow(
    folder: Path,
    size: str,
    weights: str,
    int8: Collection[str] = (),
    group_size: int = DEFAULT_GROUP_SIZE,
) -> Path:
    """A checkpoint of ``size`` (2B, 4B, 8B) in ``weights`` (bf16, fp8, int4) in the new ``folder``.

    ``int8``: which of ``head``, ``embedding`` and ``vision`` are in 8 bits, as ``vlfit convert`` has them;
    ``group_size`` is of int4.
    """
    entry = next(entry for entry in catalog.family(size) if entry.weights == catalog.BF16)
    plain = Checkpoint(entry.name, folder, entry.config, entry.tensors)
    config = _config(entry.config)
    if weights == catalog.BF16:
        work = [TensorConversion(info, (_as_it_is(info),)) for info in plain.tensors.values()]
    else:
        parts = {part: INT8 if part in int8 else UNCHANGED for part in ("head", "embedding", "vision")}
        recipe = new_recipe(plain, ConversionOptions(weights, group_size, **parts))
        work = plan_tensors(plain, recipe)
        config["quantization_config"] = quantization_config(plain, recipe)
    [shard] = plan_shards(work, _ALL_IN_ONE_FILE)
    folder.mkdir(parents=True)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(shard.header)
        file.truncate(max(end for _, end in shard.offsets.values()))
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    _borrow(folder)
    return folder


def _as_it_is(info: TensorInfo) -> OutputTensor:
    return OutputTensor(info.name, info.dtype, info.shape, info.bytes)


def _config(model: ModelConfig) -> dict[str, Any]:
    """config.json in the official form: mini's, with the sizes of ``model``."""
    config: dict[str, Any] = json.loads((mini_folder() / "config.json").read_text("utf-8"))
    config["tie_word_embeddings"] = model.tie_word_embeddings
    for section, sizes in (("text_config", model.text), ("vision_config", model.vision)):
        names = [name for name in config[section] if hasattr(sizes, name) and name != "rope_scaling"]
        config[section] |= {name: getattr(sizes, name) for name in names}
    text = config["text_config"]
    text["tie_word_embeddings"] = model.tie_word_embeddings
    text["rope_scaling"]["mrope_section"] = list(model.text.mrope_section)
    return config


def _borrow(folder: Path) -> None:
    for name in BORROWED:
        source = mini_folder() / name
        if not source.exists():
            continue
        shutil.copy(source, folder / name)
        if name == "preprocessor_config.json":
            settings = json.loads(source.read_text("utf-8"))
            (folder / name).write_text(json.dumps(settings | {"size": _PIXELS}), "utf-8")
