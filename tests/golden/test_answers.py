"""Greedy answers of every tiny checkpoint, token by token, and the same again without being asked for tokens.

Processors round differently: kept are answers whose tokens won by far (``MARGIN``). They were the same with
ATEN_CPU_CAPABILITY=default and =avx2 (ONEDNN_MAX_CPU_ISA=AVX2) as with AVX-512.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.golden.conftest import Vlfit
from tests.golden.kept import check_facts
from tests.tiny import TINY, build_tiny
from tests.tiny_decoders import DECODERS
from vlfit.api.outputs import Answer
from vlfit.client import VLM

TOKENS = 12
MARGIN = 0.002  # natural-log probability between the likeliest token and the next; rounding moves it by 1e-5
WITH_PICTURE = "Describe this picture."
WITHOUT = "one and two"
CONVERTED = {
    "tied_int4": ("tied", "-w", "int4", "--embedding", "int8"),
    "fp8_int4_vision_int8": ("fp8", "-w", "int4", "--vision", "int8"),
    "untied_sharded_fp8_head_int8": ("untied_sharded", "-w", "fp8", "--head", "int8"),
}


def picture() -> Image.Image:
    """Three slopes of 160 x 128 pixels, each colour its own."""
    x, y, colour = np.arange(160)[None, :, None], np.arange(128)[:, None, None], np.arange(3)[None, None, :]
    return Image.fromarray(((x * (colour + 2) + y * (5 - colour)) % 256).astype(np.uint8))


def cost(answer: Answer) -> str:
    usage = answer.usage
    return (
        f"{answer.finish_reason} after {usage.completion_tokens} tokens of {usage.prompt_tokens}, "
        f"{usage.image_tokens} of pictures, {usage.cached_tokens} known"
    )


def asked(vlm: VLM, question: str, *pictures: Image.Image) -> dict[str, Any]:
    """What is answered with and without tokens told, which are the same words."""
    told = vlm.ask(question, *pictures, max_tokens=TOKENS, top_logprobs=2, ignore_eos=True, loop_guard=False)
    near = [one.logprob - other.logprob for one, other in (each.top for each in told.logprobs)]
    assert min(near) > MARGIN, (
        "a processor that rounds differently could answer otherwise: ask something else"
    )
    plain = vlm.ask(question, *pictures, max_tokens=TOKENS, ignore_eos=True, loop_guard=False)
    assert plain.text == told.text
    return {
        "text": told.text,
        "tokens": " ".join(str(each.token_id) for each in told.logprobs),
        "first": cost(told),
        "again": cost(plain),
        "seen": [
            f"{seen.width}x{seen.height} as {seen.seen_width}x{seen.seen_height}: {seen.tokens} tokens"
            f"{''.join(f'; {note}' for note in seen.notes)}"
            for seen in told.images
        ],
    }


def answers_of(folder: Path, sees: bool, **options: Any) -> dict[str, Any]:
    with VLM(folder, device="cpu", dtype="float32", context=1024, sequences=1, **options) as vlm:
        found = {WITHOUT: asked(vlm, WITHOUT)}
        if sees:
            found[WITH_PICTURE] = asked(vlm, WITH_PICTURE, picture())
    return found


def test_every_tiny_checkpoint(tiny: Callable[[str], Path], tiny_decoder: Callable[[str], Path]) -> None:
    found = {name: answers_of(tiny(name), sees=True) for name in TINY}
    found |= {name: answers_of(tiny_decoder(name), sees=False) for name in DECODERS}
    check_facts("answers.json", found)


def test_other_weights_and_settings(vlfit: Vlfit, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    found = {}
    for dtype in ("float16", "bfloat16"):
        folder = build_tiny("tied", tmp_path / dtype, dtype)
        found[f"tied in {dtype}"] = answers_of(folder, sees=True)
    found["tied, kv_dtype fp8"] = answers_of(tiny("tied"), sees=True, kv_dtype="fp8")
    found["tied, speculate off"] = answers_of(tiny("tied"), sees=True, speculate=False)
    found["tied, image_tokens 8"] = answers_of(tiny("tied"), sees=True, image_tokens=8)
    for name, (source, *options) in CONVERTED.items():
        assert vlfit("convert", tiny(source), *options, "--out", tmp_path / name).code == 0
        found[name] = answers_of(tmp_path / name, sees=True)
    check_facts("answers-of-others.json", found)
