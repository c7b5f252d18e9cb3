"""A batch by a real engine says what the same engine says of each picture alone."""

from types import SimpleNamespace

import pytest

from tests.scripted_backend import png
from tests.tasks.batch.beside import item
from vlfit.api.conversation import ImagePart
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import Wanted
from vlfit.errors import DoesNotFit, UsageError
from vlfit.tasks.batch import runner as opening
from vlfit.tasks.batch.executor import Crew
from vlfit.tasks.batch.job import Wish, Work
from vlfit.tasks.batch.runner import open_for_batch
from vlfit.tasks.describe import caption

COLOURS = ("red", "green", "blue", "white", "black", "yellow")


def test_a_batch_says_what_single_requests_say() -> None:
    options = EngineOptions(device="cpu", context=256, image_tokens=16)
    backend, pace = open_for_batch(Wanted(model="mini", options=options), 3)
    try:
        sampling = SamplingParams(max_tokens=5)
        pictures = {colour: png(64, 48, colour) for colour in COLOURS}
        crew = Crew(Work(Wish.caption(), sampling), backend, pace)
        outcomes = list(crew.outcomes(item(colour, data) for colour, data in pictures.items()))
        said = {outcome.item.key: outcome.record for outcome in outcomes}
        for colour, data in pictures.items():
            alone = caption(backend, ImagePart(data), sampling=sampling)
            record = said[colour]
            assert record is not None
            assert (record["text"], record["model"]) == (alone.text, "mini")
            assert record["usage"]["image_tokens"] == (alone.usage.image_tokens or 0) > 0
            assert (record["images"][0]["width"], record["images"][0]["height"]) == (64, 48)
    finally:
        backend.close()


def test_as_many_run_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[EngineOptions] = []

    def open_backend(wanted: Wanted, progress: object) -> object:
        tried.append(wanted.options)
        if wanted.kind == "native" and wanted.options.sequences > 2:
            raise DoesNotFit("too large", "")
        return SimpleNamespace(sequences=wanted.options.sequences) if wanted.kind == "native" else object()

    monkeypatch.setattr(opening, "open_backend", open_backend)
    _, pace = open_for_batch(Wanted(model="mini"))
    assert [options.sequences for options in tried] == [8, 4, 2]
    assert pace.at_once == 3  # one waits inside for the next place
    assert (tried[-1].prefix_cache, tried[-1].image_cache_bytes, tried[-1].keep_to_plan) == (False, 0, True)
    with pytest.raises(DoesNotFit):
        open_for_batch(Wanted(model="mini"), 5)
    assert open_for_batch(Wanted(kind="remote", server="http://x"), alike=True)[1].at_once == 8
    with pytest.raises(UsageError, match="concurrency is 0"):
        open_for_batch(Wanted(model="mini"), 0)
