"""Llama 2's tokenizer, as transformers 5's ``LlamaTokenizer`` splits text regardless of tokenizer.json."""

from tokenizers import Tokenizer, pre_tokenizers

from vlfit.checkpoint.fields import Fields
from vlfit.prompt.tokenizer import TokenBytes

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def adjust_tokenizer(tokenizer: Tokenizer, settings: Fields) -> None:
    """Replace a Llama 2 tokenizer's normalizer and pre-tokenizer, in place, as tokenizer_config.json says.

    ``settings``: tokenizer_config.json. A space is prepended to the first piece of text; with the field
    ``legacy`` to every piece between special tokens; with ``add_prefix_space`` false to none. Llama 3's
    byte-level tokenizers and other tokenizer classes stay as they are.
    """
    named = settings.text("tokenizer_class", "") in _CLASSES
    if not named or TokenBytes.of(tokenizer).byte_level:
        return
    scheme = "always" if settings.flag("legacy", False) else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581",
        prepend_scheme=scheme if settings.flag("add_prefix_space", True) else "never",
        split=False,
    )
