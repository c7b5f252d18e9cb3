"""A measurement as JSON: where it was made, with what, and every number. Sizes in bytes, times in seconds.

Knows names. Does not measure, nor lay anything out (``bench/results.py``).
"""

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit._version import __version__
from vlfit.bench.measure import Decoding, Many, Measured
from vlfit.bench.workload import Wanted
from vlfit.checkpoint.quantization import FP8
from vlfit.plan.native.ram import weights_in_ram
from vlfit.units import MIB, format_bandwidth, format_bytes

# What a measurement is made with, beside the GPU: the processor's name, versions of packages.


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of Python and of the installed ones among ``packages``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


VERSION = 1


def facts_of(measured: Measured) -> dict[str, Any]:
    """All of it."""
    checkpoint, wanted = measured.checkpoint, measured.wanted
    return {
        "version": VERSION,
        "vlfit": __version__,
        "versions": versions_of("torch", "triton"),
        "machine": _machine(measured),
        "model": {
            "name": checkpoint.name,
            "weights_format": checkpoint.weights_format,
            "parameters": checkpoint.parameter_count,
            "weight_bytes": measured.weights_loaded,
        },
        "settings": _settings(measured),
        "request": {
            "picture": None if not measured.requests.image_tokens else _picture(wanted),
            "image_tokens": measured.requests.image_tokens,
            "prompt_tokens": measured.requests.prompt_tokens,
            "tokens": wanted.tokens,
            "repeat": wanted.repeat,
        },
        "roof": {
            "bytes_per_second": measured.roof,
            "why_not": measured.no_roof,
            "weights_per_step": measured.read.weights if measured.read else None,
            "bytes_per_cached_token": measured.read.per_cached_token if measured.read else None,
        },
        "decoding": [_decoding(each, measured) for each in measured.decoding],
        "first_token": {name: _many(each) for name, each in measured.parts.items()},
        "start": measured.start,
        "memory": _memory_facts(measured),
    }


def _settings(measured: Measured) -> dict[str, Any]:
    """As the engine has them; the KV cache's dtype by its name, and ``halves`` if any matrix is kept so."""
    settings, checkpoint = measured.account.settings, measured.checkpoint
    plain, halved = (
        weights_in_ram(checkpoint, settings.value_bytes, halves=wish) for wish in (False, settings.halves)
    )
    kv_dtype = settings.kv_dtype if settings.kv_dtype == FP8 else settings.dtype
    return {**asdict(settings), "kv_dtype": kv_dtype, "halves": halved != plain}


def _decoding(each: Decoding, measured: Measured) -> dict[str, Any]:
    speed, share = measured.speed_and_share(each)
    return {
        "at_once": each.at_once,
        "tokens_per_second": _many(each.speed),
        "step": _many(each.step),
        "first_token": _many(each.first_token),
        "whole": _many(each.whole),
        "cached_tokens": each.cached,
        "read_bytes_per_second": speed,
        "share_of_roof": share,
    }


def _many(many: Many) -> dict[str, Any]:
    return {"median": many.median, "deviation": many.deviation, "all": list(many.values)}


def _picture(wanted: Wanted) -> str:
    named = ", ".join(picture.label for picture in wanted.pictures)
    return named or "made up, {}x{}".format(*wanted.size)


def _memory_facts(measured: Measured) -> dict[str, Any]:
    held = measured.account.holdings
    return {
        "weights": held.weights,
        "kv_cache": held.kv_cache,
        "graphs": held.graphs,
        "gpu_process": measured.held,
        "gpu_pool_peak": held.peak_reserved,
        "ram_resident": held.resident,
    }


def _machine(measured: Measured) -> dict[str, Any]:
    gpu, card = measured.gpu, None
    if gpu is not None:
        names = ("name", "total", "free", "desktop", "driver", "cuda", "compute_capability", "bandwidth")
        card = {name: getattr(gpu, name) for name in names}
    host = measured.machine.host
    return {
        "gpu": card,
        "processor": processor(),
        "cores": host.cores,
        "ram": host.ram_total,
        "platform": host.platform,
        "wsl2": host.wsl2,
    }


# A measurement as a block of text to be posted: readable as it is, and Markdown. Knows words and columns.


_CALLED = {
    "decode": "file decoded",
    "resize": "resized",
    "text": "text and tokens",
    "vision": "vision",
    "prefill": "prefill",
}


def page(measured: Measured) -> list[str]:
    """The lines."""
    return [
        *_about(measured),
        "",
        *markdown([_HEAD, *(_row(each, measured) for each in measured.decoding)]),
        "",
        *_roof(measured),
        "",
        *markdown(_parts(measured)),
        "",
        _start(measured),
        _memory(measured),
    ]


def _about(measured: Measured) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in versions_of("torch", "triton").items())
    settings, requests = measured.account.settings, measured.requests
    checkpoint, wanted = measured.checkpoint, measured.wanted
    size = f"{format_bytes(measured.weights_loaded)} loaded, computed in {settings.dtype}"
    picture = f"{requests.image_tokens} image tokens, " if requests.image_tokens else ""
    seen = ""
    if requests.image_tokens:
        names = ", ".join(picture.label for picture in wanted.pictures)
        seen = f"picture: {names or 'made up, {}x{}'.format(*wanted.size)}; "
    waiting = f", {settings.offload} layers wait in RAM" if settings.offload else ""
    narrow = ", KV cache in fp8" if settings.kv_dtype == FP8 else ""
    return [
        f"vlfit {__version__}, {versions}",
        _where(measured),
        f"{checkpoint.name}: {checkpoint.weights_format}, "
        f"{_parameters(checkpoint.parameter_count)}, {size}{narrow}{waiting}",
        f"{seen}prompt of {requests.prompt_tokens} tokens ({picture}passes of {settings.chunk} at most), "
        f"{wanted.tokens} out, greedy; medians of {wanted.repeat} ± standard deviation",
    ]


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B parameters" if count >= 1e8 else f"{count / 1e6:.1f} M parameters"


def _where(measured: Measured) -> str:
    gpu, host = measured.gpu, measured.machine.host
    computer = f"{processor()}, {host.cores} cores, {format_bytes(host.ram_total)} of RAM"
    computer += ", WSL2" if host.wsl2 else ""
    if gpu is None:
        place = "" if measured.account.settings.device == "cpu" else f"{measured.account.settings.device}; "
        return place + computer
    return (
        f"{gpu.name}, {gpu.total / MIB:.0f} MiB of which others hold {gpu.desktop / MIB:.0f}, "
        f"driver {gpu.driver}; {computer}"
    )


_HEAD = ["at once", "tokens/s", "each", "ms a step", "GB/s", "of the roof", "first token, ms", "requests/min"]


def _row(each: Decoding, measured: Measured) -> list[str]:
    speed, share = measured.speed_and_share(each)
    return [
        str(each.at_once),
        _with_deviation(each.speed, 1, 1),
        f"{each.speed.median / each.at_once:,.1f}",
        f"{each.step.median * 1e3:.2f}",
        "-" if speed is None else f"{speed / 1e9:,.0f}" if speed > 1e11 else f"{speed / 1e9:.1f}",
        "-" if share is None else f"{share:.0%}",
        _with_deviation(each.first_token, 1e3, 0),
        f"{60 * each.at_once / each.whole.median:,.1f}",
    ]


def _with_deviation(many: Many, factor: float, places: int) -> str:
    """As precise as asked for, and more where it is small."""
    value = many.median * factor
    places = places if value >= 100 else places + 1
    return f"{value:,.{places}f} ± {many.deviation * factor:,.{places}f}"


def _roof(measured: Measured) -> list[str]:
    if measured.read is None:
        return ["roof: none, as layers wait in RAM and the link to the GPU is the limit"]
    first = measured.decoding[0]
    whole = measured.read.of(first.cached)
    weights = measured.read.weights
    step = (
        f"a step with {first.at_once} at once reads {format_bytes(round(whole))}: weights "
        f"{format_bytes(weights)}, KV cache {format_bytes(round(whole) - weights)}"
    )
    if measured.roof is None:
        return [f"roof: not known ({measured.no_roof}); {step}"]
    lines = [f"roof: memory read at {format_bandwidth(round(measured.roof))}, measured in this run; {step}"]
    if any((measured.speed_and_share(each)[1] or 0) > 1 for each in measured.decoding):
        lines.append("above 100 %: weights so small stay in caches, which are faster than memory")
    return lines


def _parts(measured: Measured) -> list[list[str]]:
    """What a first token is made of; the runs are others than those of the table above."""
    rows = [["first token", "ms", ""]]
    for name, many in measured.parts.items():
        remark = ""
        if name == "prefill":
            remark = f"{measured.requests.prompt_tokens / many.median:,.0f} tokens/s"
        elif name == "vision":
            remark = f"{measured.requests.image_tokens / many.median:,.0f} image tokens/s"
        rows.append([_CALLED[name], _with_deviation(many, 1e3, 1), remark])
    together = sum(many.median for many in measured.parts.values())
    remark = "the device waited for around vision" if "vision" in measured.parts else ""
    rows.append(["one after another", f"{together * 1e3:,.1f}", remark])
    return rows


def _start(measured: Measured) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in measured.start.items())
    return f"start: {sum(measured.start.values()):.1f} s ({parts})"


def _memory(measured: Measured) -> str:
    held = measured.account.holdings
    parts = [f"weights {format_bytes(measured.weights_loaded)}", f"KV cache {format_bytes(held.kv_cache)}"]
    if measured.account.settings.device == "cpu":
        whole = f"{format_bytes(held.resident)} of RAM" if held.resident else "RAM"
    else:
        if held.graphs:
            parts.append(f"graphs {format_bytes(held.graphs)}")
        whole = f"torch's pool at most {format_bytes(held.peak_reserved or 0)}"
        if measured.held:
            whole = f"{format_bytes(measured.held)} of the GPU, {whole}"
    return f"memory: {whole}: {', '.join(parts)}"


def markdown(rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table with aligned columns; the first of ``rows`` is its head."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(widths[i + 1]) for i, cell in enumerate(row[1:]))]
        lines.append("| " + " | ".join(cells) + " |")
    rule = "|".join("-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths))
    lines.insert(1, f"|{rule}|")
    return lines
