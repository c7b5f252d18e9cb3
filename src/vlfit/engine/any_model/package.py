"""The packages that models of any architecture need: imported when they are wanted, and asked to be quiet.

Knows: which package does what, and how a person gets one that is missing. Does not know models.
"""

import importlib.util
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from vlfit.errors import UnknownArchitecture, UsageError

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
