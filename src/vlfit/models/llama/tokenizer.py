"""Llama 2's tokenizer as transformers 5's ``LlamaTokenizer`` splits text, whatever tokenizer.json says."""

from tokenizers import Tokenizer, pre_tokenizers

from vlfit.checkpoint.fields import Fields
from vlfit.prompt.tokenizer import TokenBytes

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def adjust_tokenizer(tokenizer: Tokenizer, settings: Fields) -> None:
    """Replace normalizer and pre-tokenizer by those of ``settings`` (tokenizer_config.json).

    With ``legacy`` a space is prepended to every piece between special tokens, else only to the first. Llama
    3's byte-level vocabularies stay as they are.
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
