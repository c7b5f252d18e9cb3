"""Load a model and its processor through transformers' auto classes; check what transformers only logs."""

import importlib.util
import inspect
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vlfit.backends.transformers.model_errors import model_error
from vlfit.checkpoint.any_model import AnyCheckpoint, ledger_line_of_tensor
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.errors import CheckpointError, MissingTensor, UnknownArchitecture, UsageError, VlfitError
from vlfit.units import GIB, counted

_EXTRA = "pip install 'vlfit[transformers]'"


def import_transformers() -> Any:
    """Import and return the package transformers, with its progress bars turned off.

    Its warnings are turned off, too, unless ``TRANSFORMERS_VERBOSITY`` is set. Raises ``UsageError`` if
    transformers is missing or too old, or a package that it needs is missing.
    """
    # Files are fetched by ``checkpoint/hub.py`` alone; transformers needs no network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import transformers
    except ImportError as error:
        if error.name not in (None, "transformers"):
            raise UsageError(
                f"transformers cannot be imported: {error}", f"Install what it needs: {_EXTRA}."
            ) from error
        raise UsageError("the package transformers is not installed", f"Install it: {_EXTRA}.") from None
    from transformers.utils import logging as quiet

    quiet.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        quiet.set_verbosity_error()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not hasattr(transformers, "AutoModelForImageTextToText"):
        raise UsageError(
            f"transformers {transformers.__version__} is too old", f"Install 5 or newer: {_EXTRA}."
        )
    return transformers


def has_accelerate() -> bool:
    """Whether the package accelerate, which places weights on devices, is installed."""
    return importlib.util.find_spec("accelerate") is not None


def require_accelerate() -> None:
    """Raise ``UsageError`` if accelerate is missing."""
    if not has_accelerate():
        raise UsageError(
            "offloading layers to RAM needs the package accelerate, which is not installed",
            "Install it: pip install accelerate.",
            param="offload",
        )


def check_architecture(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ``UnknownArchitecture`` if the installed transformers cannot run the checkpoint in ``folder``.

    Reads config.json only; returns if that is missing or no JSON, which later readers report.
    ``trust_remote_code``: accept a model of another architecture if it brings Python code of its own.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return  # the next reader reports the error
    kind = config.get("model_type") if isinstance(config, dict) else None
    package = import_transformers()
    if kind in supported_model_types():
        return
    if isinstance(config, dict) and config.get("auto_map"):
        if trust_remote_code:
            return
        raise UnknownArchitecture(
            f"config.json: model_type is {kind!r}, which transformers {package.__version__} runs only with "
            "Python code that comes with the model",
            "If you trust its authors, add --trust-remote-code.",
        )
    raise UnknownArchitecture(
        f"config.json: model_type is {kind!r}, which is not an image-text-to-text model that "
        f"transformers {package.__version__} knows",
        "Newer versions know more: pip install --upgrade transformers. Text-only models do not run here.",
    )


def supported_model_types() -> frozenset[str]:
    """Each ``model_type`` that the installed transformers runs as an image-text-to-text model."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def has_parameter(function: Any, name: str) -> bool:
    """Whether ``function`` has a parameter named ``name``; this differs between versions of transformers."""
    return name in inspect.signature(function).parameters


class NoVideoProcessor:
    """Stands in for a processor's video processor if torchvision is missing. Calls raise ``UsageError``."""

    model_input_names: tuple[str, ...] = ()
    merge_size = 1
    temporal_patch_size = 1

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "video clips need the package torchvision",
            "Install torchvision in the version for your torch.",
        )

    def __getattr__(self, name: str) -> None:
        """None for settings that some processors look up without a clip."""
        if name.startswith("__"):
            raise AttributeError(name)


def load_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    """The transformers processor of the checkpoint in ``folder``.

    Its video processor is a ``NoVideoProcessor`` if torchvision is needed and missing. ``trust_remote_code``:
    run Python files that come with the checkpoint. Raises ``UsageError`` for a missing package,
    ``CheckpointError`` for a processor without tokenizer or image processor, and ``ModelFailed`` for files
    that transformers cannot read.
    """
    package = import_transformers()
    wishes = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        try:
            processor = package.AutoProcessor.from_pretrained(str(folder), **wishes)
        except (ImportError, ValueError) as error:
            if "torchvision" not in str(error).lower():
                raise
            processor = _without_clips(folder, wishes)
    except Exception as error:
        raise loading_error(error, "reading the processor's files", folder) from None
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise CheckpointError(
            f"the processor in {folder} is a {type(processor).__name__}, without a part for pictures",
            "Download the whole checkpoint: preprocessor_config.json is missing or wrong.",
        )
    return processor


def takes_clips(processor: Any) -> bool:
    """Whether a processor from ``load_processor`` takes video clips."""
    part = getattr(processor, "video_processor", None)
    return part is not None and not isinstance(part, NoVideoProcessor)


def _without_clips(folder: Path, wishes: dict[str, Any]) -> Any:
    """The checkpoint's processor class, with ``NoVideoProcessor`` as its video processor."""
    package = import_transformers()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING[type(package.AutoConfig.from_pretrained(str(folder), **wishes))]
    stand_in = NoVideoProcessor()

    class Lenient(whole):  # type: ignore[misc]
        """transformers has no public way to leave a part out."""

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
                return NoVideoProcessor
            return super().check_argument_for_proper_class(argument_name, argument)

        def __repr__(self) -> str:  # the original writes all parts as JSON
            return str(whole.__name__)

    Lenient.__name__ = whole.__name__  # the processor finds its settings by this name
    return Lenient.from_pretrained(str(folder), **wishes)


def loading_error(error: Exception, doing: str, folder: Path) -> VlfitError:
    """The vlfit error to raise in place of ``error`` from transformers, for a checkpoint in ``folder``.

    ``UsageError`` if a package or ``--trust-remote-code`` is missing, else ``model_error(error, doing)``.
    """
    words = str(error)
    if "trust_remote_code" in words or "execute the configuration file" in words:
        return UsageError(
            f"the model in {folder} needs Python code that comes with it",
            "If you trust its authors, add --trust-remote-code.",
        )
    if isinstance(error, ImportError) or "pip install" in words or "to be installed" in words:
        first = " ".join(words.split()).split(". ")[0] or type(error).__name__
        return UsageError(f"the model in {folder} needs a package that is missing: {first}", "Install it.")
    return model_error(error, doing)


# Fields of GenerationConfig that are kept. Sampling is done in ``generate.py``.
_KEPT = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "disable_compile"),
)


def read_config(checkpoint: AnyCheckpoint, *, trust_remote_code: bool) -> Any:
    """The checkpoint's config as a transformers config object. Raises what ``loading_error`` returns.

    ``trust_remote_code``: run Python files that come with the checkpoint.
    """
    try:
        return import_transformers().AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise loading_error(error, "reading config.json", checkpoint.folder) from None


def load_model(
    checkpoint: AnyCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
    weight_limit: int | None,
    *,
    trust_remote_code: bool,
) -> Any:
    """Load the checkpoint's transformers model for inference, in ``dtype``.

    ``weight_limit``: most bytes of weights on ``device``, the rest is offloaded to RAM; None: no offload.
    Raises ``UsageError`` if offload needs accelerate and it is missing, ``MissingTensor`` if the files lack
    weights, and what ``loading_error`` returns.
    """
    package = import_transformers()
    wishes: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
    }
    place = device.index or 0
    if weight_limit is not None:
        require_accelerate()
        wishes |= {"device_map": "auto", "max_memory": {place: weight_limit, "cpu": 1024 * GIB}}
    elif device.type == "cuda" and has_accelerate():
        wishes["device_map"] = {"": place}  # straight to the GPU, without a full copy in RAM
    try:
        model, found = package.AutoModelForImageTextToText.from_pretrained(
            str(checkpoint.folder), output_loading_info=True, **wishes
        )
        if "device_map" not in wishes:
            model = model.to(device)
    except Exception as error:
        raise loading_error(error, "loading the model", checkpoint.folder) from None
    _check_loading_info(found, checkpoint)
    return model.eval()


def extract_generation_defaults(model: Any, tokenizer: Any) -> GenerationDefaults:
    """Take the checkpoint's generation defaults out of ``model`` and return them.

    ``model.generation_config`` keeps only fields that do not choose tokens, as vlfit samples by itself.
    ``tokenizer``: names the EOS token if the generation config does not. ``max_new_tokens`` is always None.
    """
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
        kept["pad_token_id"] = int(eos[0])  # generate() requires it, though one row is never padded
    model.generation_config = import_transformers().GenerationConfig(do_sample=False, **kept)
    return wished


def weight_bytes_by_line(model: Any, device: torch.device) -> dict[str, int]:
    """Bytes of the model's parameters and buffers on ``device``, by name of the ledger line.

    Offloaded weights are left out. A storage that several tensors share counts once.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[ledger_line_of_tensor(name)] = sizes.get(ledger_line_of_tensor(name), 0) + storage.nbytes()
    return sizes


def num_offloaded_modules(model: Any) -> int:
    """How many modules accelerate has placed in RAM (``hf_device_map``); 0 without offload."""
    places: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    return sum(place in ("cpu", "disk") for place in places.values()) if len(places) > 1 else 0


def _check_loading_info(found: Mapping[str, Any], checkpoint: AnyCheckpoint) -> None:
    """Raise ``MissingTensor``: transformers only logs missing weights and fills them with random numbers."""
    missing = sorted(found.get("missing_keys") or ())
    wrong = found.get("mismatched_keys") or ()
    if not missing and not wrong:
        return
    names = missing or [str(each[0] if isinstance(each, tuple) else each) for each in wrong]
    what = "missing" if missing else "of other shapes than the config says"
    raise MissingTensor(
        f"{checkpoint.name}: {counted(len(names), 'tensor')} {what}, {names[0]} first",
        "Download it again, or upgrade transformers: pip install --upgrade transformers.",
    )


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else default
