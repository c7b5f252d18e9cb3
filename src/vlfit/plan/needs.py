"""Download, disk, RAM and conversion time that a plan needs, before it can start.

Sizes are exact, RAM was measured on servers, and the time of a conversion is estimated.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vlfit.checkpoint import catalog, hub
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.gguf import repository
from vlfit.checkpoint.quantization import INT4
from vlfit.plan.calibration import MEASURED, MODELLED, Constant
from vlfit.plan.shapes import Model, model_of

SERVER_RAM = Constant(
    1.7e9,
    MEASURED,
    "resident at most while 2B, 4B and 8B start and serve, less a table of tokens in RAM; H200 "
    "(benchmarks/measured/memory-h200.json)",
)
CONVERSION_RAM = Constant(0.5e9, MEASURED, "463 MiB resident at most, 2B to int4 and FP8, 2026-11-22")
# Processor seconds for a weight, on one thread and on several, as benchmarks/conversion.py prints them beside
# these: 67 ns in all for int4 and 22 for FP8. On two cores of a Xeon, 2B, they were 65 (54 of them on several
# threads) and 17 (9) on 2026-11-23, 69 and 19 by hand the day before.
CONVERSION_SERIAL = Constant(
    16e-9, MEASURED, "2B to int4 and FP8, what one thread does: reading, dequantizing, writing"
)
CONVERSION_PARALLEL = {INT4: 51e-9, "int8": 38e-9, "fp8": 6e-9}
CONVERSION_CORES = 4  # that the estimate is for, as where it will run may not be known
DISK_RATE = Constant(500e6, MODELLED, "bytes per second of a SATA SSD: assumed")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plan takes beside GPU memory, in bytes, on a computer that has no file of the model yet.

    ``disk``: the download plus the converted copy, if any. ``ram``: the most at any time, while converting or
    serving. ``conversion_s``: estimated seconds of ``vlfit convert`` on ``CONVERSION_CORES`` cores; None:
    nothing is converted.
    """

    download: int
    disk: int
    ram: int
    conversion_s: float | None = None


NO_NEEDS = Needs(0, 0, 0)


def needs_of(model: Model, offloaded_bytes: int = 0) -> Needs:
    """The needs of ``model``; ``download`` is 0 if its files, or those to convert, are local.

    ``offloaded_bytes``: bytes of weights that stay in RAM, which ``ram`` includes.
    """
    ram = SERVER_RAM.bytes + offloaded_bytes
    if not model.converted_from:
        download = model.file_bytes if _is_remote(model.source) else 0
        return Needs(download, download, ram)
    source = _source(model.converted_from)
    download = source.file_bytes if source is not None and _is_remote(model.converted_from) else 0
    seconds = _conversion_seconds(model, source)
    return Needs(download, download + model.file_bytes, max(ram, CONVERSION_RAM.bytes), seconds)


@cache
def _source(name: str) -> Model | None:
    """The checkpoint of the catalog that is converted; None for others."""
    entry = catalog.find_entry(name)
    return None if entry is None else model_of(entry.name, entry.config, entry.tensor_groups, "")


def _is_remote(name: str) -> bool:
    if repository.parse_name(name) is not None:
        return repository.cached_file(name) is None
    return hub.is_hub_name(name) and not Path(name).exists()


def _conversion_seconds(model: Model, source: Model | None) -> float:
    """Reading and writing at ``DISK_RATE``, or rounding if that takes longer."""
    seconds = 0.0
    for form, count in _converted_weights(model, source):
        seconds += count * (
            CONVERSION_SERIAL.value
            + CONVERSION_PARALLEL.get(form, CONVERSION_PARALLEL["int8"]) / CONVERSION_CORES
        )
    read = source.file_bytes if source is not None else model.file_bytes
    return max(seconds, (read + model.file_bytes) / DISK_RATE.value)


def _converted_weights(model: Model, source: Model | None) -> list[tuple[str, int]]:
    """Formats and numbers of the weights that are rounded."""
    text = model.num_weights_per_token - model.head.num_weights
    found = [(model.weights, text)]
    if model.own_head and model.head.form != BF16:
        found.append((model.head.form, model.head.num_weights))
    if "--embedding" in model.convert_options:
        found.append(("int8", model.text.vocab_size * model.text.hidden_size))
    if model.tower_is_quantized:
        found.append(("int8", (source.vision_bytes if source is not None else 2 * model.vision_bytes) // 2))
    return found
