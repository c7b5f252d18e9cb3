"""mini's tokenizer: byte-level BPE in 4,096 ids, Qwen's pre-tokenizer, Qwen's 26 added tokens at the end.

    python -m training.mini.tokenizer --out FOLDER      learns it anew (a few minutes; needs the materials)

The corpus is the scene texts, and the documentation in Python's own library for everyday English.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.mini.arguments import folder_outside
from training.mini.atlas import Atlas
from training.mini.clips import ask_clip, draw_clip
from training.mini.lettering import fonts, letter
from training.mini.lots import draw_scene
from training.mini.manners import SYSTEMS, small_talk
from training.mini.prepare import MATERIALS
from training.mini.several import ask_several, draw_several
from training.mini.teller import Exchange
from training.mini.texts import conversation, dialogue

VOCABULARY = 4096
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
ADDED = (*SPECIAL, *PLAIN)
FIRST_ADDED = VOCABULARY - len(ADDED)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIBRARY = (
    "argparse", "asyncio", "collections", "datetime", "decimal", "email", "http", "json", "logging", "os",
    "pathlib", "random", "re", "shutil", "socket", "statistics", "string", "subprocess", "tarfile",
    "threading", "turtle", "typing", "unittest", "urllib.parse", "zipfile",
)  # fmt: skip
PACKAGE = Path(__file__).parents[2] / "src" / "vlfit" / "mini"


def added_id(token: str) -> int:
    """The id of an added token."""
    return FIRST_ADDED + ADDED.index(token)


def corpus(atlas: Atlas, scenes: int = 20000) -> Iterator[str]:
    """Everything mini is taught to say or asked, and plain English around it.

    Written words stay out: what is read is better spelled, letter by letter, than guessed as one token.
    """
    atlas = atlas.without_words()
    for seed in range(scenes):
        random = np.random.default_rng(seed)
        yield from said(small_talk(random))
        if seed < len(SYSTEMS):
            yield SYSTEMS[seed]
        scene = draw_scene(seed, (256, 256), atlas)
        for exchange in (*conversation(scene, random, 6), *dialogue(scene, random)):
            yield from said(exchange)
        if seed % 10 == 0:
            for exchange in ask_several(draw_several(seed, (256, 256), 2 + seed % 20 // 10, atlas), random):
                yield from said(exchange)
            for exchange in ask_clip(draw_clip(seed, (256, 256), 4, atlas), random):
                yield from said(exchange)
    yield from library_documentation()


def said(exchange: Exchange) -> tuple[str, str]:
    """Both sides of an exchange."""
    return exchange.question, exchange.answer


def library_documentation() -> Iterator[str]:
    """English sentences that are on every machine with Python: the docstrings of its library."""
    import importlib

    for name in LIBRARY:
        try:
            module = importlib.import_module(name)
        except ImportError:  # turtle needs a Python built with Tk
            continue
        texts = [module.__doc__] + [getattr(value, "__doc__", None) for value in vars(module).values()]
        for text in texts:
            if isinstance(text, str):
                yield text


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Learn the merges and append the added tokens; the ids fill 0..VOCABULARY-1 exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_ADDED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != FIRST_ADDED:
        raise SystemExit(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {FIRST_ADDED}: give it more text"
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        str(added_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in ADDED
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": described,
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(given: list[str] | None = None) -> int:
    """Learn and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.mini.tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=folder_outside(PACKAGE), required=True, metavar="FOLDER", help="the folder to write to"
    )
    arguments = parser.parse_args(given)
    path = MATERIALS / "atlas.npz"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run python -m training.mini.prepare first")
    random = np.random.default_rng(0)
    numbers = letter(Atlas.load(path), [str(number) for number in range(1000)], fonts(), random)
    write(train_tokenizer(corpus(numbers)), arguments.out)
    print(f"tokenizer written to {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
