"""What a backend's model can do, as far as its checkpoint is on this computer."""

from vlfit.backends.base import Backend
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.checkpoint.source import Checkpoint
from vlfit.prompt import reasoning
from vlfit.prompt.reasoning import Thinking


def checkpoint_of(backend: Backend) -> Checkpoint | AnyCheckpoint | None:
    """The checkpoint that ``backend`` runs; None if the model runs on another server."""
    return getattr(backend, "checkpoint", None)


def sees_pictures(backend: Backend) -> bool:
    """Whether requests may have pictures; True, as unknown, for a model on another server."""
    checkpoint = checkpoint_of(backend)
    if checkpoint is None:
        return True
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.config.vision is not None
    return "vision_config" in checkpoint.config


def thinking_of(backend: Backend, variables: str | None = None) -> Thinking | None:
    """How the model writes its reasoning; None if it does not reason, or if vlfit does not know.

    ``variables``: ``SamplingParams.template_variables`` of the request (``enable_thinking``).
    """
    return backend.thinking_with(variables)


def with_variables(thinking: Thinking | None, backend: Backend, variables: str | None) -> Thinking | None:
    """``thinking`` of ``backend``'s model as the ``variables`` of a request make it (``enable_thinking``)."""
    if thinking is None or variables is None:
        return thinking
    return reasoning.with_variables(thinking, backend.chat_template, variables)
