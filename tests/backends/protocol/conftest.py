"""The bundled checkpoint over every backend, each opened once, and the reference of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from tests.pictures import picture
from tests.server.harness import running
from tests.vllm_parser import PYTHON
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.base import Backend
from vlfit.backends.native import NativeBackend
from vlfit.backends.opening import BackendKind, BackendSpec, open_backend, parse_backend_kind
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.server.server_settings import ServerSettings
from vlfit.tasks.objects import detect_prompt

MODEL = "mini"
CONTEXT = 1024
OPTIONS = EngineOptions(device="cpu", dtype="float32", max_model_len=CONTEXT, max_num_seqs=2)

BACKENDS = [
    "native",
    "remote",
    "transformers",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.timeout(600),
            pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON"),
        ],
    ),
]


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend, and whether its server reports all that vlfit's does."""

    kind: BackendKind
    backend: Backend

    @property
    def reports_counts(self) -> bool:
        return self.kind != "vllm"


@contextmanager
def open_kind(kind: BackendKind) -> Iterator[Backend]:
    """The bundled checkpoint over ``kind``; ``remote`` uses a vlfit server in a thread."""
    if kind == "remote":
        with (
            NativeBackend.load(MODEL, OPTIONS) as behind,
            running(behind, ServerSettings(context=behind.context)) as server,
        ):
            backend = open_backend(BackendSpec(kind=kind, server=server.url))
            try:
                yield backend
            finally:
                backend.close()
        return
    # A vLLM that records nothing starts sooner and says the same.
    vllm = VllmOptions(python=PYTHON or None, words=("--enforce-eager",))
    # Plans for vLLM count 16 bits a number, and here it computes in 32, to have the reference's words.
    options = replace(OPTIONS, kv_tokens=4 * CONTEXT) if kind == "vllm" else OPTIONS
    backend = open_backend(BackendSpec(kind=kind, model=MODEL, options=options, vllm=vllm))
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module", params=BACKENDS)
def given(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    import torch

    torch.set_num_threads(1)
    kind = parse_backend_kind(request.param)
    with open_kind(kind) as backend:
        yield BackendUnderTest(kind, backend)


@pytest.fixture(scope="module")
def backend(given: BackendUnderTest) -> Backend:
    return given.backend


def jpeg(seed: int, width: int = 150, height: int = 110) -> ImagePart:
    """A JPEG, which all servers decode alike."""
    file = BytesIO()
    Image.open(BytesIO(picture(width, height, seed=seed))).convert("RGB").save(file, "JPEG", quality=90)
    return ImagePart(file.getvalue())


CONVERSATIONS: dict[str, Conversation] = {
    "text": single_turn("What can you do?"),
    "system": single_turn("What can you do?", system="Answer in one word."),
    "picture": single_turn("What is in the picture?", jpeg(1)),
    "two pictures": single_turn("What is different?", jpeg(2), jpeg(3, 90, 200)),
    "boxes": single_turn(detect_prompt("circles"), jpeg(1)),
    "turns": (
        Message("user", (TextPart("What is this?"), jpeg(4))),
        Message("assistant", (TextPart("A picture."),)),
        Message("user", (TextPart("What colour is it?"),)),
    ),
}


@dataclass(frozen=True)
class Expected:
    """What the reference says: its words, token ids of the prompt and of the answer, and of the first step
    the logprobs of all tokens.
    """

    text: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    first_logprobs: Any
    image_tokens: int


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Expected]:
    """transformers' model and processor on one of ``CONVERSATIONS``, greedy."""
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    from tests.reference_processor import reference_processor

    folder = open_checkpoint(MODEL).folder
    torch.set_num_threads(1)
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = reference_processor(folder)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=MOST,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.eos_token_id[0],
    )

    @cache
    def say(name: str) -> Expected:
        messages = [
            {"role": message.role, "content": [_content(part) for part in message.parts]}
            for message in CONVERSATIONS[name]
        ]
        inputs = processor.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            generated = model.generate(
                **inputs, generation_config=greedy, output_logits=True, return_dict_in_generate=True
            )
        prompt = inputs["input_ids"][0].tolist()
        answer = generated.sequences[0, len(prompt) :].tolist()
        return Expected(
            processor.tokenizer.decode(answer, skip_special_tokens=True),
            tuple(prompt),
            tuple(answer),
            torch.log_softmax(generated.logits[0][0], -1),
            prompt.count(model.config.image_token_id),
        )

    return say


MOST = 16


def _content(part: Any) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image", "image": Image.open(BytesIO(part.data)).convert("RGB")}
