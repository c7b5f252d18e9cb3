"""A measurement as JSON: where it was made, with what, and every number. Sizes in bytes, times in seconds.

Knows names. Does not measure, nor lay anything out (``page.py``).
"""

from dataclasses import asdict
from typing import Any

from vlfit._version import __version__
from vlfit.bench.measure import Decoding, Many, Measured
from vlfit.bench.surroundings import processor, versions_of
from vlfit.bench.wanted import Wanted
from vlfit.checkpoint.quantization import FP8
from vlfit.plan.in_ram import weights_in_ram

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
        "memory": _memory(measured),
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


def _memory(measured: Measured) -> dict[str, Any]:
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
