"""A batch on a cluster of two machines: complete whatever dies, and nothing written twice."""

import os
import signal
import socket
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.ray.parts import Gallery, GalleryPicture, MemoryOutput, RecordedProgress, at, gallery, job
from tests.server.harness import Running, running
from tests.server.scripted import ScriptedBackend
from vlfit.backends.opening import BackendSpec
from vlfit.errors import ClusterError, NotAPicture
from vlfit.tasks.batch.executor import BatchExecutor, Outcome
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.job import PictureTask
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray.cluster import PictureSample, connect
from vlfit.tasks.batch.ray.coordinator import run_on_ray
from vlfit.tasks.batch.runner import open_for_batch

# Ray warns of names of its own that it uses itself.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


@pytest.fixture
def server() -> Iterator[Running]:
    """A model that says the same of every picture, in a fifth of a second."""
    with running(ScriptedBackend(delay=0.03)) as server:
        yield server


def keys(source: Gallery) -> list[str]:
    return [item.key for item in source]


def test_words_are_those_of_one_machine(cluster: str) -> None:
    pictures = Gallery((*map(GalleryPicture, range(12)), GalleryPicture(12, bad=True)))
    book, heard = MemoryOutput(), RecordedProgress()
    wanted = BackendSpec(model="mini")
    tally = run_on_ray(job(), wanted, RayOptions(cluster, 2), source=pictures, output=book, progress=heard)
    backend, options = open_for_batch(wanted)
    executor = BatchExecutor(PictureTask.from_job(job()), backend, options)
    here = {outcome.item.key: outcome.record for outcome in executor.outcomes(pictures)}
    backend.close()
    assert sorted(here) == keys(pictures)
    for key, record in book.records.items():
        expected = here[key]
        assert expected is not None
        for name in ("key", "picture", "text", "model", "finish_reason", "images"):
            assert record[name] == expected[name]
    assert list(book.failures) == ["0012.png"]
    assert isinstance(book.failures["0012.png"], NotAPicture)
    assert (tally.done, tally.failed, book.model) == (12, 1, "mini")
    assert heard.workers  # one or two: the first may have done all when the other has its model
    assert "the gallery is closed" in heard.said


class Killer(RecordedProgress):
    """Ends a worker when ``after`` pictures are done, and then writes the file ``killed``."""

    def __init__(self, after: int, killed: Path) -> None:
        super().__init__()
        self.after = after
        self.killed = killed

    def settled(self, outcome: Outcome) -> None:
        super().settled(outcome)
        if self.tally.settled == self.after:
            os.kill(self.workers[0], signal.SIGKILL)
            self.killed.touch()


def test_a_killed_worker_loses_nothing(cluster: str, server: Running, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    # Chunks have 25 pictures. Four of the eight wait, so that the first worker has some when it is killed.
    pictures, book, killer = gallery(200, 100, killed), MemoryOutput(), Killer(30, killed)
    run_on_ray(
        job(),
        at(server.url),
        RayOptions(cluster, 2),
        source=pictures,
        output=book,
        progress=killer,
        concurrency=8,
    )
    assert sorted(book.records) == keys(pictures)  # MemoryOutput refuses a second record of a key
    assert len(killer.workers) == 3
    assert any("died" in text for text in killer.said)
    assert not book.failures


def test_a_picture_that_kills_its_worker_fails_alone(cluster: str, server: Running) -> None:
    # None of the first pictures, which are read here.
    pictures = Gallery(tuple(GalleryPicture(number, ends=number == 17) for number in range(24)))
    book, heard = MemoryOutput(), RecordedProgress()
    run_on_ray(job(), at(server.url), RayOptions(cluster, 2), source=pictures, output=book, progress=heard)
    assert list(book.failures) == ["0017.png"]
    assert isinstance(book.failures["0017.png"], ClusterError)
    assert len(book.records) == 23
    assert any("one by one" in text for text in heard.said)


class Nobody:
    """Does nothing, in a place of its own."""

    def there(self) -> bool:
        return True


@pytest.fixture
def busy_home(cluster: str) -> Iterator[None]:
    """The first machine's core is taken: a worker finds room on the other."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder: Any = ray.remote(num_cpus=1)(Nobody).options(scheduling_strategy=here).remote()
    ray.get(holder.there.remote())
    yield
    ray.kill(holder)


@pytest.mark.usefixtures("busy_home")
def test_pictures_are_sent_to_machines_that_lack_them(
    cluster: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.ray.conftest import AT_HOME

    monkeypatch.setenv(AT_HOME, "1")
    pictures = Gallery(tuple(GalleryPicture(number, far=True) for number in range(20)))
    book, heard = MemoryOutput(), RecordedProgress()
    run_on_ray(job(), at(server.url), RayOptions(cluster, 1), source=pictures, output=book, progress=heard)
    assert sorted(book.records) == keys(pictures)
    assert any("sent to the workers" in text for text in heard.said)


class Missing(Item):
    """Of a package that the other machine lacks."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return import_module, ("a_package_that_nobody_has",)


def test_a_machine_that_cannot_run_it_is_named(cluster: str) -> None:
    with connect(RayOptions(cluster)) as here:
        pool = here.plan_worker_pool(RayOptions(cluster, 2), "cpu")
        sample = PictureSample(Missing("a.png", bytes), None)
        with pytest.raises(ClusterError, match="a_package_that_nobody_has") as raised:
            here.inspect_nodes(pool, BackendSpec(model="mini"), (sample,))
    assert raised.value.message.startswith(socket.gethostname())


def test_what_is_settled_is_not_asked_again(cluster: str, server: Running) -> None:
    pictures, book, heard = gallery(20), MemoryOutput(), RecordedProgress()
    options = RayOptions(cluster, 1)
    run_on_ray(job(), at(server.url), options, source=pictures, output=book, progress=heard, limit=6)
    assert sorted(book.records) == keys(pictures)[:6]
    first = dict(book.records)
    run_on_ray(
        job(), at(server.url), options, source=pictures, output=book, progress=(heard := RecordedProgress())
    )
    assert sorted(book.records) == keys(pictures)
    assert all(book.records[key] is record for key, record in first.items())
    assert (heard.tally.done, heard.tally.skipped) == (14, 6)
    run_on_ray(
        job(), at(server.url), options, source=pictures, output=book, progress=(heard := RecordedProgress())
    )
    assert heard.said == []  # nothing left: no cluster is reached


def test_what_concerns_all_is_said_once_and_ends_the_run(cluster: str) -> None:
    with running(ScriptedBackend()) as server:
        gone = server.url
    book = MemoryOutput()
    with pytest.raises(Exception, match=r"on .*: .*"):
        run_on_ray(job(), at(gone), RayOptions(cluster, 1), source=gallery(4), output=book, tries=1)
    assert not book.records
