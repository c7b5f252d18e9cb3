"""Brings a model of any architecture to where it computes, as transformers does, with nothing left to chance.

Knows: which arguments say where weights go, and what transformers only remarks upon that must be an error.
Does not know: what fits (``plan/any_model.py``), or prompts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vlfit.checkpoint.any_model import AnyCheckpoint, part_of
from vlfit.checkpoint.sidecar import GenerationDefaults
from vlfit.engine.any_model.package import check_accelerate, has_accelerate, transformers
from vlfit.engine.any_model.processor import told
from vlfit.errors import MissingTensor
from vlfit.units import GIB

# Of GenerationConfig: what says how the model runs. All that chooses tokens is ours (``generating.py``).
_KEPT = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "disable_compile"),
)


def read_config(checkpoint: AnyCheckpoint, *, code: bool) -> Any:
    """The config as transformers fills it in. Raises what ``told`` makes of what it raises."""
    try:
        return transformers().AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=code, local_files_only=True
        )
    except Exception as error:
        raise told(error, "reading config.json", checkpoint.folder) from None


def load_model(
    checkpoint: AnyCheckpoint, device: torch.device, dtype: torch.dtype, here: int | None, *, code: bool
) -> Any:
    """The model, ready to answer. ``here``: bytes of weights that may be on ``device``, the rest waits in
    RAM; None: all of them are there.

    Raises ``UsageError`` for a package that is missing, ``MissingTensor`` where the files lack weights.
    """
    package = transformers()
    wishes: dict[str, Any] = {"dtype": dtype, "trust_remote_code": code, "local_files_only": True}
    place = device.index or 0
    if here is not None:
        check_accelerate()
        wishes |= {"device_map": "auto", "max_memory": {place: here, "cpu": 1024 * GIB}}
    elif device.type == "cuda" and has_accelerate():
        wishes["device_map"] = {"": place}  # straight to the GPU, without a copy of all of it in RAM
    try:
        model, found = package.AutoModelForImageTextToText.from_pretrained(
            str(checkpoint.folder), output_loading_info=True, **wishes
        )
        if "device_map" not in wishes:
            model = model.to(device)
    except Exception as error:
        raise told(error, "loading the model", checkpoint.folder) from None
    _check_found(found, checkpoint)
    return model.eval()


def take_over_generation(model: Any, tokenizer: Any) -> GenerationDefaults:
    """What the checkpoint says of generating; the model is left with none of it that chooses tokens."""
    config = model.generation_config
    ended = getattr(config, "eos_token_id", None)
    if ended is None:
        ended = getattr(tokenizer, "eos_token_id", None)
    eos = ended if isinstance(ended, list | tuple) else () if ended is None else (ended,)
    wished = GenerationDefaults(
        do_sample=bool(getattr(config, "do_sample", False)),
        temperature=_number(config, "temperature", 1.0),
        top_p=_number(config, "top_p", 1.0),
        top_k=int(_number(config, "top_k", 0)),
        min_p=_number(config, "min_p", 0.0),
        repetition_penalty=_number(config, "repetition_penalty", 1.0),
        eos_token_ids=tuple(int(each) for each in eos),
        max_new_tokens=None,
    )
    kept = {name: getattr(config, name) for name in _KEPT if getattr(config, name, None) is not None}
    if kept.get("pad_token_id") is None and eos:
        kept["pad_token_id"] = int(eos[0])  # of one row nothing is padded, but generate() wants to know
    model.generation_config = transformers().GenerationConfig(do_sample=False, **kept)
    return wished


def weight_holdings(model: Any, device: torch.device) -> dict[str, int]:
    """Bytes of parameters and buffers on ``device`` by ledger line; a storage that is shared counts once."""
    held: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held[part_of(name)] = held.get(part_of(name), 0) + storage.nbytes()
    return held


def waiting_layers(model: Any) -> int:
    """Modules that wait in RAM for a GPU."""
    places: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    return sum(place in ("cpu", "disk") for place in places.values()) if len(places) > 1 else 0


def _check_found(found: Mapping[str, Any], checkpoint: AnyCheckpoint) -> None:
    """transformers fills with chance what the files lack, and only remarks upon it."""
    missing = sorted(found.get("missing_keys") or ())
    wrong = found.get("mismatched_keys") or ()
    if not missing and not wrong:
        return
    names = missing or [str(each[0] if isinstance(each, tuple) else each) for each in wrong]
    what = "are missing" if missing else "have other shapes than the config says"
    raise MissingTensor(
        f"{len(names)} tensors of {checkpoint.name} {what}, {names[0]} first",
        "fetch it again, or take a transformers that knows it: pip install --upgrade transformers",
    )


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else default
