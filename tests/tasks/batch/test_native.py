"""A batch by a real engine says what the same engine says of each picture alone."""

from types import SimpleNamespace

import pytest

from tests.scripted_backend import png
from tests.tasks.batch.beside import item
from vlfit.api.conversation import ImagePart
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import BackendSpec
from vlfit.errors import DoesNotFit, UsageError
from vlfit.tasks.batch import runner as opening
from vlfit.tasks.batch.executor import BatchExecutor
from vlfit.tasks.batch.job import PictureTask, Wish
from vlfit.tasks.batch.runner import open_for_batch
from vlfit.tasks.describe import caption

COLOURS = ("red", "green", "blue", "white", "black", "yellow")


def test_a_batch_says_what_single_requests_say() -> None:
    options = EngineOptions(device="cpu", max_model_len=256, image_tokens=16)
    backend, options_for_batch = open_for_batch(BackendSpec(model="mini", options=options), 3)
    try:
        sampling = SamplingParams(max_tokens=5)
        pictures = {colour: png(64, 48, colour) for colour in COLOURS}
        executor = BatchExecutor(PictureTask(Wish.caption(), sampling), backend, options_for_batch)
        outcomes = list(executor.outcomes(item(colour, data) for colour, data in pictures.items()))
        records = {outcome.item.key: outcome.record for outcome in outcomes}
        for colour, data in pictures.items():
            alone = caption(backend, ImagePart(data), sampling=sampling)
            record = records[colour]
            assert record is not None
            assert (record["text"], record["model"]) == (alone.text, "mini")
            assert record["usage"]["image_tokens"] == (alone.usage.image_tokens or 0) > 0
            assert (record["images"][0]["width"], record["images"][0]["height"]) == (64, 48)
    finally:
        backend.close()


def test_as_many_run_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[EngineOptions] = []

    def open_backend(wanted: BackendSpec, progress: object) -> object:
        tried.append(wanted.options)
        if wanted.kind == "native" and wanted.options.max_num_seqs > 2:
            raise DoesNotFit("too large", "")
        return SimpleNamespace(sequences=wanted.options.max_num_seqs) if wanted.kind == "native" else object()

    monkeypatch.setattr(opening, "open_backend", open_backend)
    _, executor_options = open_for_batch(BackendSpec(model="mini"))
    assert [options.max_num_seqs for options in tried] == [8, 4, 2]
    assert executor_options.max_in_flight == 3  # a quarter more, at least one
    assert (tried[-1].prefix_cache, tried[-1].image_cache_bytes, tried[-1].enforce_plan) == (False, 0, True)
    with pytest.raises(DoesNotFit):
        open_for_batch(BackendSpec(model="mini"), 5)
    assert (
        open_for_batch(BackendSpec(kind="remote", server="http://x"), shared_prefix=True)[1].max_in_flight
        == 8
    )
    with pytest.raises(UsageError, match=r"concurrency.* 0"):
        open_for_batch(BackendSpec(model="mini"), 0)
