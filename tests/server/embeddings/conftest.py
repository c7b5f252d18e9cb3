"""Servers of tiny models: one that chats, an embedding model, a reranker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.harness import Running, running
from tests.tiny_pooled import make_embedding_model, make_reranker
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings

CONTEXT = 512
OPTIONS = EngineOptions(device="cpu", max_model_len=CONTEXT, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooled")


@pytest.fixture(scope="module")
def embedding(tiny: Callable[[str], Path], folder: Path) -> Iterator[NativeBackend]:
    made = make_embedding_model(tiny("tied"), folder / "tiny-embedding")
    with NativeBackend.load(made, OPTIONS) as backend:
        yield backend


@pytest.fixture(scope="module")
def chatting(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), OPTIONS) as backend:
        yield backend


@pytest.fixture(scope="module")
def reranker(tiny: Callable[[str], Path], folder: Path) -> Iterator[NativeBackend]:
    with NativeBackend.load(make_reranker(tiny("tied"), folder / "tiny-reranker"), OPTIONS) as backend:
        yield backend


@pytest.fixture(scope="module")
def server(embedding: NativeBackend) -> Iterator[Running]:
    with running(embedding, ServerSettings(max_completions=24, picture_limit=8)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def chat_server(chatting: NativeBackend) -> Iterator[Running]:
    with running(chatting) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def rerank_server(reranker: NativeBackend) -> Iterator[Running]:
    with running(reranker, ServerSettings(max_completions=24)) as running_server:
        yield running_server
