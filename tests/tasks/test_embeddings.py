"""Vectors and scores in Python: prompts are those of training; what ``VLM.embed`` takes and returns."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pictures import picture
from tests.scripted_backend import ScriptedBackend
from tests.tiny_pooled import INSTRUCTION, make_embedding_model, make_reranker
from vlfit.api.conversation import ImagePart
from vlfit.api.pooling import QUERY_INSTRUCTION
from vlfit.backends.native import NativeBackend
from vlfit.client import VLM
from vlfit.errors import DoesNotFit, InvalidRequest, PictureError, UsageError
from vlfit.prompt.builder import PromptBuilder
from vlfit.tasks.embeddings import (
    WINDOW,
    EmbedInput,
    embed_all,
    embedding_conversation,
    rerank_conversation,
)

CLOSE = 1e-4  # as in tests/engine/test_pooling.py
PHOTO = picture(96, 64)
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@pytest.fixture(scope="module")
def vlm(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLM]:
    folder = make_embedding_model(tiny("tied"), tmp_path_factory.mktemp("made") / "tiny-embedding")
    with VLM(folder, device="cpu", context=512, sequences=2) as model:
        yield model


@pytest.fixture(scope="module")
def reranker(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLM]:
    folder = make_reranker(tiny("tied"), tmp_path_factory.mktemp("made") / "tiny-reranker")
    with VLM(folder, device="cpu", context=512, sequences=2) as model:
        yield model


def rendered(vlm: VLM, conversation: Any) -> str:
    """The prompt as text, with one placeholder for each picture."""
    backend = vlm._backend
    assert isinstance(backend, NativeBackend)
    prompts: PromptBuilder = backend.engine.prompts
    prompt = prompts.build(conversation)
    text = prompts.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    repeated = prompt.image_tokens // max(len(prompt.images), 1)
    return text.replace("<|image_pad|>" * repeated, "<|image_pad|>") if prompt.images else text


@pytest.mark.parametrize(
    ("given", "instruction", "system", "user"),
    [
        (EmbedInput("a cat"), None, INSTRUCTION, "a cat"),
        (EmbedInput("a cat"), "Find it", "Find it.", "a cat"),
        (EmbedInput("a cat"), "  Find it!  ", "Find it!", "a cat"),
        (EmbedInput("", (ImagePart(PHOTO),)), "", INSTRUCTION, PLACEHOLDER),
        (EmbedInput("a cat", (ImagePart(PHOTO),)), "找到。", "找到。", f"{PLACEHOLDER}a cat"),
    ],
)
def test_the_prompt_of_a_vector(
    vlm: VLM, given: EmbedInput, instruction: str | None, system: str, user: str
) -> None:
    """As in the scripts beside Qwen3-VL-Embedding: system, user, and the header of an answer."""
    conversation = embedding_conversation(vlm._backend, given.parts, instruction)
    assert rendered(vlm, conversation) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("query", "document", "instruction", "wanted"),
    [
        (
            EmbedInput("a cat"),
            EmbedInput("It sleeps."),
            None,
            "<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
            "<Query>:a cat\n<Document>:It sleeps.",
        ),
        (
            EmbedInput("a cat", (ImagePart(PHOTO),)),
            EmbedInput("", (ImagePart(PHOTO),)),
            "Find it",
            f"<Instruct>: Find it<Query>:{PLACEHOLDER}a cat\n<Document>:{PLACEHOLDER}",
        ),
        (EmbedInput("a"), None, "x", "<Instruct>: x<Query>:a\n<Document>:NULL"),
    ],
)
def test_the_prompt_of_a_score(
    reranker: VLM, query: EmbedInput, document: EmbedInput | None, instruction: str | None, wanted: str
) -> None:
    """As in the scripts beside Qwen3-VL-Reranker."""
    parts = document.parts if document is not None else ()
    conversation = rerank_conversation(reranker._backend, query.parts, parts, instruction)
    assert rendered(reranker, conversation) == (
        f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{wanted}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_items_of_every_kind(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(PHOTO)
    vectors = vlm.embed(["a cat", file, PHOTO, ("a cat", file), ("a cat", str(file)), "photo.png"])
    assert vectors.dtype == np.float32
    assert vectors.shape == (6, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(vectors[1], vectors[2], atol=CLOSE)
    np.testing.assert_allclose(vectors[3], vectors[4], atol=CLOSE)
    for one, other in ((0, 1), (0, 3), (1, 3), (1, 5), (0, 5)):
        assert float(vectors[one] @ vectors[other]) < 1 - CLOSE
    for single in ("a cat", file, ("a cat", file)):
        assert vlm.embed(single).shape == (1, 64)
    np.testing.assert_allclose(vlm.embed("a cat"), vectors[:1], atol=CLOSE)


def test_dimensions_and_instructions(vlm: VLM) -> None:
    whole = vlm.embed(["a cat", "a dog"])
    some = vlm.embed(["a cat", "a dog"], dimensions=16)
    kept = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(some, kept, atol=CLOSE)
    asked = vlm.embed("a cat", instruction=QUERY_INSTRUCTION)
    assert float(asked[0] @ whole[0]) < 1 - CLOSE
    assert vlm.embed([]).shape == (0, 64)
    assert vlm.embed([], dimensions=16).shape == (0, 16)
    assert (vlm.embedding_size, vlm.is_embedding_model) == (64, True)


def test_more_items_than_fit_into_a_window(vlm: VLM) -> None:
    texts = [f"text number {number}" for number in range(3 * WINDOW)]
    vectors = vlm.embed(texts)
    for number in (0, WINDOW, 3 * WINDOW - 1):
        np.testing.assert_allclose(vlm.embed(texts[number])[0], vectors[number], atol=CLOSE)


def test_items_are_read_as_they_are_needed(vlm: VLM) -> None:
    taken = 0

    def inputs() -> Iterator[EmbedInput]:
        nonlocal taken
        for number in range(10 * WINDOW):
            taken += 1
            yield EmbedInput(f"text {number}")

    results = embed_all(vlm._backend, inputs())
    next(results)
    assert taken == WINDOW
    results.close()  # type: ignore[attr-defined]
    assert vlm.embed("still there").shape == (1, 64)


def test_the_first_error_ends_it(vlm: VLM, tmp_path: Path) -> None:
    for items, error in (
        (["a", tmp_path / "missing.png", "b"], PictureError),
        (["a", b"no picture", "b"], PictureError),
        (["a", "a lazy dog " * 1000], DoesNotFit),
        (["a", ("a", "b", "c")], UsageError),
    ):
        with pytest.raises(error):
            vlm.embed(items)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        vlm.embed("a", dimensions=65)
    assert vlm.embed("still there").shape == (1, 64)


def test_several_threads_at_once(vlm: VLM) -> None:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        results[number] = vlm.embed([f"text {number}", PHOTO])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, vectors in results.items():
        np.testing.assert_allclose(vectors, vlm.embed([f"text {number}", PHOTO]), atol=CLOSE)


def test_scores(reranker: VLM) -> None:
    scores = reranker.rerank("a cat", ["It sleeps.", PHOTO, ("a cat", PHOTO), "It sleeps."])
    assert all(0 <= score <= 1 for score in scores)
    assert scores[0] == pytest.approx(scores[3], abs=CLOSE)
    assert len({round(score, 4) for score in scores}) == 3
    assert reranker.rerank("a", []) == []


def test_models_that_do_something_else_refuse(vlm: VLM, reranker: VLM) -> None:
    with pytest.raises(UsageError) as caught:
        reranker.embed("a")
    assert caught.value.param == "model"
    with pytest.raises(UsageError):
        _ = reranker.embedding_size
    with pytest.raises(UsageError):
        vlm.rerank("a", ["b"])
    for model in (vlm, reranker):
        with pytest.raises(InvalidRequest) as refused:
            model.ask("What is this?")
        assert refused.value.param == "model"


def test_a_backend_without_vectors_refuses() -> None:
    with pytest.raises(UsageError):
        list(embed_all(ScriptedBackend(["x"]), [EmbedInput("a")]))
