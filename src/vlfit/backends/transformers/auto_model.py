"""Brings a model of any architecture to where it computes, as transformers does, with nothing left to chance.

Knows: which arguments say where weights go, and what transformers only remarks upon that must be an error.
Does not know: what fits (``plan/transformers/cost.py``), or prompts.
"""

import importlib.util
import inspect
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vlfit.backends.transformers.model_errors import in_one
from vlfit.checkpoint.any_model import AnyCheckpoint, part_of
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.errors import CheckpointError, MissingTensor, UnknownArchitecture, UsageError, VlfitError
from vlfit.units import GIB

# The packages that models of any architecture need: imported when they are wanted, and asked to be quiet.
#
# Knows: which package does what, and how a person gets one that is missing. Does not know models.


_EXTRA = "pip install 'vlfit[transformers]'"


def transformers() -> Any:
    """The package, without its bars and remarks on stderr. Raises ``UsageError`` where it is missing."""
    # Files are fetched by ``checkpoint/hub.py`` alone; what is looked up beside them would need a network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import transformers
    except ImportError as error:
        if error.name not in (None, "transformers"):
            raise UsageError(
                f"transformers cannot be imported: {error}", f"install what it needs: {_EXTRA}"
            ) from error
        raise UsageError("the package transformers is not installed", _EXTRA) from None
    from transformers.utils import logging as quiet

    quiet.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        quiet.set_verbosity_error()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not hasattr(transformers, "AutoModelForImageTextToText"):
        raise UsageError(
            f"transformers {transformers.__version__} is too old for this", f"take 5 or newer: {_EXTRA}"
        )
    return transformers


def has_accelerate() -> bool:
    """Whether the package accelerate, which places the weights of a model, is installed."""
    return importlib.util.find_spec("accelerate") is not None


def check_accelerate() -> None:
    """Raises ``UsageError`` where it is missing."""
    if not has_accelerate():
        raise UsageError(
            "layers that wait in RAM need the package accelerate, which is not installed",
            "pip install accelerate",
            param="offload",
        )


def check_known(folder: Path, *, code: bool = False) -> None:
    """Raises ``UnknownArchitecture`` for one that this transformers has no class for; reads only the config.

    ``code``: the checkpoint may bring its own.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return  # what reads it next says what is wrong with it
    kind = config.get("model_type") if isinstance(config, dict) else None
    package = transformers()
    if kind in known_types():
        return
    if isinstance(config, dict) and config.get("auto_map"):
        if code:
            return
        raise UnknownArchitecture(
            f"config.json: model_type is {kind!r}, which transformers {package.__version__} runs only with "
            "Python code that comes with the model",
            "If you trust its makers with your computer, add --trust-remote-code.",
        )
    raise UnknownArchitecture(
        f"config.json: model_type is {kind!r}, which is no image-text-to-text model that "
        f"transformers {package.__version__} knows",
        "Newer ones know more: pip install --upgrade transformers. Models of text alone are not run so.",
    )


def known_types() -> frozenset[str]:
    """The ``model_type`` of every architecture that takes pictures and text and gives text."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def takes(function: Any, name: str) -> bool:
    """Whether ``function`` has a parameter called ``name``: versions of transformers differ."""
    return name in inspect.signature(function).parameters


# A checkpoint's processor, loaded as far as the installed packages go.
#
# Knows: that a processor is put together of parts, and that the one for clips needs torchvision. Without it
# the rest is loaded all the same: pictures then go through the parts that need Pillow alone.


class NoClips:
    """Stands where the processor for clips would, and says what is missing when it is asked for anything."""

    model_input_names: tuple[str, ...] = ()
    merge_size = 1
    temporal_patch_size = 1

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UsageError("clips need the package torchvision", "pip install torchvision, as fits your torch")

    def __getattr__(self, name: str) -> None:
        """Some processors look up how clips are sampled while there is none: nobody said."""
        if name.startswith("__"):
            raise AttributeError(name)


def load_processor(folder: Path, *, code: bool) -> Any:
    """The processor of the checkpoint in ``folder``; ``code``: its own Python files may be run.

    Raises ``UsageError`` for a package that is missing, ``CheckpointError`` for files that are not what they
    should be, and for a model that takes no pictures.
    """
    package = transformers()
    wishes = {"trust_remote_code": code, "local_files_only": True}
    try:
        try:
            processor = package.AutoProcessor.from_pretrained(str(folder), **wishes)
        except (ImportError, ValueError) as error:
            if "torchvision" not in str(error).lower():
                raise
            processor = _without_clips(folder, wishes)
    except Exception as error:
        raise told(error, "reading the processor's files", folder) from None
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise CheckpointError(
            f"the processor in {folder} is a {type(processor).__name__}, without a part for pictures",
            "Fetch the whole checkpoint: preprocessor_config.json says how pictures are read.",
        )
    return processor


def has_clips(processor: Any) -> bool:
    """Whether it takes clips."""
    part = getattr(processor, "video_processor", None)
    return part is not None and not isinstance(part, NoClips)


def _without_clips(folder: Path, wishes: dict[str, Any]) -> Any:
    """The same class of processor, with ``NoClips`` in place of the part that cannot be loaded."""
    package = transformers()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING[type(package.AutoConfig.from_pretrained(str(folder), **wishes))]
    stand_in = NoClips()

    class Lenient(whole):  # type: ignore[misc]
        """There is no public way to leave a part out."""

        @classmethod
        def _get_arguments_from_pretrained(cls, place: Any, *_: Any, **__: Any) -> list[Any]:
            names = whole.get_attributes() if hasattr(whole, "get_attributes") else whole.attributes
            return [cls._part(name, place) for name in names]

        @staticmethod
        def _part(name: str, place: Any) -> Any:
            if name == "video_processor":
                return stand_in
            loader = package.AutoTokenizer if name == "tokenizer" else package.AutoImageProcessor
            return loader.from_pretrained(str(place), **wishes)

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is stand_in:
                return NoClips
            return super().check_argument_for_proper_class(argument_name, argument)

        def __repr__(self) -> str:  # which else writes all parts out as JSON
            return str(whole.__name__)

    Lenient.__name__ = whole.__name__  # by which the processor finds its settings
    return Lenient.from_pretrained(str(folder), **wishes)


def told(error: Exception, doing: str, folder: Path) -> VlfitError:
    """``error``, raised while ``doing`` something with the files in ``folder``, in our words."""
    words = str(error)
    if "trust_remote_code" in words or "execute the configuration file" in words:
        return UsageError(
            f"the model in {folder} comes with Python code of its own, which is not run unasked",
            "If you trust its makers with your computer, add --trust-remote-code.",
        )
    if isinstance(error, ImportError) or "pip install" in words or "to be installed" in words:
        first = " ".join(words.split()).split(". ")[0] or type(error).__name__
        return UsageError(f"the model in {folder} needs a package that is missing: {first}", "install it")
    return in_one(error, doing)


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
