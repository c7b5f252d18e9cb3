"""From a plan's settings to the command that starts its backend.

Knows: the options of ``vlfit serve``. A backend that has no command (a library, or one whose settings no
option carries) has none here.
"""

from vlfit.plan.ledger import NATIVE, Settings
from vlfit.plan.model import Model

SERVE_CHUNK = 1024  # tokens of a pass when `vlfit serve` is not told otherwise


def command_of(model: Model, backend: str, settings: Settings) -> tuple[list[str] | None, dict[str, str]]:
    """The command's words and the environment that it needs; None where no command starts this plan."""
    makers = {NATIVE: _native}
    make = makers.get(backend)
    return make(model, settings) if make else (None, {})


def _native(model: Model, settings: Settings) -> tuple[list[str] | None, dict[str, str]]:
    words = ["vlfit", "serve", model.name, "--context", str(settings.context)]
    words += ["--sequences", str(settings.sequences)]
    if settings.image_tokens:
        words += ["--image-tokens", str(settings.image_tokens)]
    if settings.chunk != SERVE_CHUNK:
        words += ["--chunk", str(settings.chunk)]
    return words, {}
