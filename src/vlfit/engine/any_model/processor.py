"""A checkpoint's processor, loaded as far as the installed packages go.

Knows: that a processor is put together of parts, and that the one for clips needs torchvision. Without it the
rest is loaded all the same: pictures then go through the parts that need Pillow alone.
"""

from pathlib import Path
from typing import Any

from vlfit.engine.any_model.failures import in_one
from vlfit.engine.any_model.package import transformers
from vlfit.errors import CheckpointError, UsageError, VlfitError


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
