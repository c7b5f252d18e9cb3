"""Reads a checkpoint's tokenizer as transformers reads it. No torch.

Knows: ``tokenizer.json``, the special tokens that templates may write, and the one place where transformers 5
goes by another rule than the file's. Does not know: templates or conversations.
"""

from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.sidecar import tokenizer_file
from vlfit.engine.spelling import Spelling
from vlfit.errors import CheckpointError

_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ``CheckpointError`` for one that is missing, broken, or of a kind that vlfit cannot read."""
    path = tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from error
    if Spelling.of(tokenizer).byte_level and tokenizer.pre_tokenizer is None:
        raise CheckpointError(f"{path} has no pre_tokenizer", "Fetch this file again.")
    _as_llama(tokenizer, folder)
    # Settings of whoever saved it; a prompt is neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_llama(tokenizer: Tokenizer, folder: Path) -> None:
    """transformers 5 splits the text of Llama 2 by its ``LlamaTokenizer``, whatever the file says: with
    ``legacy`` a space goes before every piece between special tokens, without only before the first.
    """
    settings, config = _settings(folder), Fields.read(folder / "config.json")
    named = settings.text("tokenizer_class", "") in _LLAMA_CLASSES
    if config.text("model_type", "") != "llama" or not named or Spelling.of(tokenizer).byte_level:
        return
    scheme = "always" if settings.flag("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581",
        prepend_scheme=scheme if settings.flag("add_prefix_space", True) else "never",
        split=False,
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, which templates may write."""
    values = _settings(folder).values
    named = {name: values[name] for name in values if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _settings(folder: Path) -> Fields:
    path = folder / "tokenizer_config.json"
    return Fields.read(path) if path.is_file() else Fields({}, path.name)
