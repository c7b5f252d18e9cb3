"""vlfit runs Qwen3-VL on the GPU a person already owns.

``import vlfit`` is cheap: it loads no torch and no model. The names below are the public API and are
imported when first used; a test pins the list.
"""

# Not typing's: until ``__main__`` has set its handler, Ctrl-C shows a traceback, and typing takes long.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from vlfit._version import __version__
    from vlfit.api.outputs import Answer
    from vlfit.client import VLM, Client
    from vlfit.errors import VlfitError


__all__ = ["VLM", "Answer", "Client", "VlfitError", "__version__"]

_HOMES = {
    "__version__": "vlfit._version",
    "VLM": "vlfit.client",
    "Client": "vlfit.client",
    "Answer": "vlfit.api.outputs",
    "VlfitError": "vlfit.errors",
}


def __getattr__(name: str) -> "Any":
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vlfit' has no attribute {name!r}")
