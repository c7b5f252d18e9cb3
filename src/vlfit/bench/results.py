"""Results of a benchmark as JSON (sizes in bytes, times in seconds) and as a Markdown page to post."""

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlfit._version import __version__
from vlfit.bench.card_row import (
    NOT_VERIFIED,
    CardRow,
    driver_text,
    row_block,
    unusual_settings,
    unusual_weights,
)
from vlfit.bench.measure import BenchResult, DecodeResult, Samples
from vlfit.bench.workload import BenchOptions
from vlfit.checkpoint.quantization import FP8
from vlfit.plan.native.ram import weight_bytes_in_ram
from vlfit.units import MIB, counted, format_bandwidth, format_bytes


def cpu_name() -> str:
    """Model name of this machine's CPU, such as ``AMD Ryzen 7 5800X``; the architecture if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions_of(*packages: str) -> dict[str, str]:
    """Versions by name: of ``python``, and of each of ``packages`` that is installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


VERSION = 1


def to_json(measured: BenchResult) -> dict[str, Any]:
    """The JSON object that ``vlfit bench --json`` prints: sizes in bytes, times in seconds."""
    checkpoint, options = measured.checkpoint, measured.options
    return {
        "version": VERSION,
        "vlfit": __version__,
        "versions": versions_of("torch", "triton"),
        "machine": _machine(measured),
        "model": {
            "name": checkpoint.name,
            "weights_format": checkpoint.weights_format,
            "parameters": checkpoint.parameter_count,
            "weight_bytes": measured.weight_bytes,
        },
        "settings": settings_json(measured),
        "request": {
            "picture": None if not measured.requests.image_tokens else _picture(options),
            "image_tokens": measured.requests.image_tokens,
            "prompt_tokens": measured.requests.prompt_tokens,
            "tokens": options.tokens,
            "repeat": options.repeat,
        },
        "roof": {
            "bytes_per_second": measured.roof,
            "why_not": measured.roof_error,
            "weights_per_step": measured.step_bytes.weights if measured.step_bytes else None,
            "bytes_per_cached_token": measured.step_bytes.per_cached_token if measured.step_bytes else None,
        },
        "decoding": [_decoding(each, measured) for each in measured.decoding],
        "first_token": {name: _samples(each) for name, each in measured.first_token_parts.items()},
        "start": measured.startup_phases,
        "memory": _memory_facts(measured),
    }


def settings_json(measured: BenchResult) -> dict[str, Any]:
    """The settings that the engine ran with, as a JSON object.

    ``kv_dtype``: the dtype of the KV cache, never ``auto``. ``halves``: whether any weight matrix is kept in
    16 bits on a CPU.
    """
    settings, checkpoint = measured.account.settings, measured.checkpoint
    plain, halved = (
        weight_bytes_in_ram(checkpoint, settings.value_bytes, cpu_16_bit=wish, cpu_stored=settings.cpu_stored)
        for wish in (False, settings.cpu_16_bit)
    )
    kv_dtype = settings.kv_dtype if settings.kv_dtype == FP8 else settings.dtype
    return {
        "device": settings.device,
        "gpu_uuid": settings.gpu_uuid,
        "dtype": settings.dtype,
        "value_bytes": settings.value_bytes,
        "context": settings.context,
        "image_tokens": settings.image_tokens,
        "sequences": settings.sequences,
        "chunk": settings.chunk,
        "kv_tokens": settings.kv_tokens,
        "offload": settings.offload,
        "halves": halved != plain,
        "kv_dtype": kv_dtype,
        "speculate": settings.speculate,
    }


def _decoding(each: DecodeResult, measured: BenchResult) -> dict[str, Any]:
    speed, share = measured.read_speed_and_share(each)
    return {
        "at_once": each.concurrency,
        "tokens_per_second": _samples(each.speed),
        "step": _samples(each.step),
        "first_token": _samples(each.first_token),
        "whole": _samples(each.whole),
        "cached_tokens": each.cached_tokens,
        "read_bytes_per_second": speed,
        "share_of_roof": share,
    }


def _samples(samples: Samples) -> dict[str, Any]:
    return {"median": samples.median, "deviation": samples.deviation, "all": list(samples.values)}


def _picture(options: BenchOptions) -> str:
    named = ", ".join(picture.label for picture in options.pictures)
    return named or "made up, {}x{}".format(*options.size)


def _memory_facts(measured: BenchResult) -> dict[str, Any]:
    memory = measured.account.memory
    return {
        "weights": memory.weights,
        "kv_cache": memory.kv_cache,
        "graphs": memory.cuda_graphs,
        "gpu_process": measured.gpu_bytes,
        "gpu_pool_peak": memory.peak_reserved,
        "ram_resident": memory.resident,
    }


def _machine(measured: BenchResult) -> dict[str, Any]:
    gpu, card = measured.gpu, None
    if gpu is not None:
        names = ("name", "total", "free", "desktop", "driver", "cuda", "compute_capability", "bandwidth")
        card = {name: getattr(gpu, name) for name in names}
    host = measured.machine.host
    return {
        "gpu": card,
        "processor": cpu_name(),
        "cores": host.cores,
        "ram": host.ram_total,
        "platform": host.platform,
        "wsl2": host.wsl2,
    }


# The page: readable as plain text, and valid Markdown.

_PART_NAMES = {
    "decode": "file decoded",
    "resize": "resized",
    "text": "text and tokens",
    "vision": "vision",
    "prefill": "prefill",
}


def markdown_page(measured: BenchResult, width: int | None = None) -> list[str]:
    """Lines of a Markdown page with all results, to post.

    ``width``: wrap lines to so many characters, and leave out columns of tables that are wider; None:
    neither.
    """
    return [
        *_wrapped(_setup_lines(measured), width),
        "",
        *markdown_table([_HEAD, *(_row(each, measured) for each in measured.decoding)], width),
        "",
        *_wrapped(_roof(measured), width),
        "",
        *markdown_table(_parts(measured), width),
        "",
        *_wrapped([_start(measured), _memory(measured)], width),
        "",
        *_to_post(measured, width),
    ]


def card_row(measured: BenchResult) -> CardRow | None:
    """The row of ``docs/cards.md``; None if no request ran alone."""
    alone = next((each for each in measured.decoding if each.concurrency == 1), None)
    if alone is None:
        return None
    gpu, settings, options = measured.gpu, measured.account.settings, measured.options
    on_cpu = settings.device == "cpu"
    return CardRow(
        device=gpu.name if gpu is not None else cpu_name() if on_cpu else settings.device,
        driver="" if gpu is None else driver_text(gpu),
        vlfit=__version__,
        model=measured.checkpoint.name,
        format_name=measured.checkpoint.stored_format,
        verdict=NOT_VERIFIED,
        held_bytes=measured.held_bytes,
        planned_bytes=measured.planned_bytes,
        tokens_per_s=alone.speed.median,
        first_token_s=alone.first_token.median,
        asked=", ".join(_asked(measured)),
        unusual=(*unusual_settings(options, settings), *_room(options)),
    )


def _asked(measured: BenchResult) -> list[str]:
    """What the request of the row was, and how often it ran: all that is not the default, in words."""
    options, requests, usual = measured.options, measured.requests, BenchOptions()
    named = ["text"]
    if requests.image_tokens:
        most = "at most " if len(options.pictures) > 1 else ""
        own = f"an own picture of {most}{counted(requests.image_tokens, 'token')}"
        named = [own if options.pictures else "{}x{}".format(*options.size)]
    if options.context is not None:
        named.append(f"prompt of {counted(requests.prompt_tokens, 'token')}")
    if options.tokens != usual.tokens:
        named.append(f"answer of {counted(options.tokens, 'token')}")
    if options.repeat != usual.repeat:
        named.append(counted(options.repeat, "run"))
    return named


def _room(options: BenchOptions) -> list[str]:
    """For how many requests at once memory was taken, if not for as many as usual."""
    most = max(options.batches)
    return [] if most == max(BenchOptions().batches) else [f"memory for {most} at once"]


def _to_post(measured: BenchResult, width: int | None) -> list[str]:
    """The row to post, never narrower than it is."""
    row = card_row(measured)
    if row is None:
        return _wrapped(["no row for docs/cards.md: --batch has no request alone"], width)
    return [*_wrapped(["to post, as a row of docs/cards.md:"], width), "", *row_block(row)]


def _wrapped(lines: list[str], width: int | None) -> list[str]:
    if width is None:
        return lines
    return [part for line in lines for part in textwrap.wrap(line, max(width, 20), break_on_hyphens=False)]


def _setup_lines(measured: BenchResult) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in versions_of("torch", "triton").items())
    settings, requests = measured.account.settings, measured.requests
    checkpoint, options = measured.checkpoint, measured.options
    loaded = (
        f"{format_bytes(measured.weight_bytes)} loaded",
        f"computed in {settings.dtype}",
        *unusual_weights(options, settings),
    )
    picture = f"{requests.image_tokens} image tokens, " if requests.image_tokens else ""
    seen = ""
    if requests.image_tokens:
        names = ", ".join(picture.label for picture in options.pictures)
        seen = f"picture: {names or 'generated, {}x{}'.format(*options.size)}; "
    return [
        f"vlfit {__version__}, {versions}",
        _computer_and_gpu(measured),
        f"{checkpoint.name}: {checkpoint.stored_format}, "
        f"{_parameters(checkpoint.parameter_count)}, {', '.join(loaded)}",
        f"{seen}prompt of {requests.prompt_tokens} tokens ({picture}passes of {settings.chunk} at most), "
        f"{options.tokens} generated, greedy; medians of {options.repeat} ± standard deviation",
    ]


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B parameters" if count >= 1e8 else f"{count / 1e6:.1f} M parameters"


def _computer_and_gpu(measured: BenchResult) -> str:
    gpu, host = measured.gpu, measured.machine.host
    computer = f"{cpu_name()}, {counted(host.cores, 'core')}, {format_bytes(host.ram_total)} of RAM"
    computer += ", WSL2" if host.wsl2 else ""
    if gpu is None:
        place = "" if measured.account.settings.device == "cpu" else f"{measured.account.settings.device}; "
        return place + computer
    return (
        f"{gpu.name}, {gpu.total / MIB:.0f} MiB of which others hold {gpu.desktop / MIB:.0f}, "
        f"driver {gpu.driver}; {computer}"
    )


_LEFT_OUT_FIRST = ("GB/s", "each", "requests/min", "ms a step", "")  # columns, on a narrow terminal
_HEAD = ["at once", "tokens/s", "each", "ms a step", "GB/s", "of the roof", "first token, ms", "requests/min"]


def _row(each: DecodeResult, measured: BenchResult) -> list[str]:
    speed, share = measured.read_speed_and_share(each)
    return [
        str(each.concurrency),
        _with_deviation(each.speed, 1, 1),
        f"{each.speed.median / each.concurrency:,.1f}",
        f"{each.step.median * 1e3:.2f}",
        "-" if speed is None else f"{speed / 1e9:,.0f}" if speed > 1e11 else f"{speed / 1e9:.1f}",
        "-" if share is None else f"{share:.0%}",
        _with_deviation(each.first_token, 1e3, 0),
        f"{60 * each.concurrency / each.whole.median:,.1f}",
    ]


def _with_deviation(samples: Samples, factor: float, places: int) -> str:
    """With ``places`` decimals, and one more below 100."""
    value = samples.median * factor
    places = places if value >= 100 else places + 1
    return f"{value:,.{places}f} ± {samples.deviation * factor:,.{places}f}"


def _roof(measured: BenchResult) -> list[str]:
    if measured.step_bytes is None:
        return ["roof: none, as layers wait in RAM and the link to the GPU is the limit"]
    first = measured.decoding[0]
    whole = measured.step_bytes.total(first.cached_tokens)
    weights = measured.step_bytes.weights
    step = (
        f"a step with {first.concurrency} at once reads {format_bytes(round(whole))}: weights "
        f"{format_bytes(weights)}, KV cache {format_bytes(round(whole) - weights)}"
    )
    if measured.roof is None:
        return [f"roof: not known ({measured.roof_error}); {step}"]
    lines = [f"roof: memory read at {format_bandwidth(round(measured.roof))}, measured in this run; {step}"]
    if any((measured.read_speed_and_share(each)[1] or 0) > 1 for each in measured.decoding):
        lines.append("above 100 %: weights so small stay in caches, which are faster than memory")
    return lines


def _parts(measured: BenchResult) -> list[list[str]]:
    """Parts of the time to first token, from requests other than those of the table above."""
    rows = [["first token", "ms", ""]]
    for name, samples in measured.first_token_parts.items():
        remark = ""
        if name == "prefill":
            remark = f"{measured.requests.prompt_tokens / samples.median:,.0f} tokens/s"
        elif name == "vision":
            remark = f"{measured.requests.image_tokens / samples.median:,.0f} image tokens/s"
        rows.append([_PART_NAMES[name], _with_deviation(samples, 1e3, 1), remark])
    together = sum(samples.median for samples in measured.first_token_parts.values())
    remark = "with pauses around vision" if "vision" in measured.first_token_parts else ""
    rows.append(["sum", f"{together * 1e3:,.1f}", remark])
    return rows


def _start(measured: BenchResult) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in measured.startup_phases.items())
    return f"start: {sum(measured.startup_phases.values()):.1f} s ({parts})"


def _memory(measured: BenchResult) -> str:
    memory = measured.account.memory
    parts = [f"weights {format_bytes(measured.weight_bytes)}", f"KV cache {format_bytes(memory.kv_cache)}"]
    if memory.state_cache:
        parts.append(f"states {format_bytes(memory.state_cache)}")
    if measured.account.settings.device == "cpu":
        whole = f"{format_bytes(memory.resident)} of RAM" if memory.resident else "RAM"
    else:
        if memory.cuda_graphs:
            parts.append(f"graphs {format_bytes(memory.cuda_graphs)}")
        whole = f"torch's pool at most {format_bytes(memory.peak_reserved or 0)}"
        if measured.gpu_bytes:
            whole = f"{format_bytes(measured.gpu_bytes)} of the GPU, {whole}"
    return f"memory: {whole}: {', '.join(parts)}"


def markdown_table(rows: list[list[str]], width: int | None = None) -> list[str]:
    """Lines of a Markdown table with aligned columns; the first of ``rows`` is the header.

    ``width``: while the table is wider than so many characters, the less important columns are left out, one
    by one; None: none are.
    """
    head = rows[0]
    for name in _LEFT_OUT_FIRST:
        if width is None or _table_width(rows) <= width:
            break
        if name in head:
            rows = [[cell for cell, of in zip(row, head, strict=True) if of != name] for row in rows]
            head = rows[0]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(widths[i + 1]) for i, cell in enumerate(row[1:]))]
        lines.append("| " + " | ".join(cells) + " |")
    rule = "|".join("-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths))
    lines.insert(1, f"|{rule}|")
    return lines


def _table_width(rows: list[list[str]]) -> int:
    return sum(max(map(len, column)) + 3 for column in zip(*rows, strict=True)) + 1
