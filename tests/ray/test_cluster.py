"""Size of the worker pool, and errors of connecting. No cluster is started."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlfit.errors import ClusterError
from vlfit.tasks.batch.ray import RayOptions, cluster, pipeline
from vlfit.tasks.batch.ray.cluster import CapturedStdout, connect

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


def test_a_worker_for_each_gpu_or_for_each_few() -> None:
    gpus = {"head": 0, "a": 8, "b": 3}
    pool = cluster._pool_on_gpus(RayOptions(), gpus)
    assert (pool.size, pool.gpus, pool.nodes) == (11, 1, ("a", "b"))
    pool = cluster._pool_on_gpus(RayOptions(gpus_per_worker=2), gpus)
    assert (pool.size, pool.capacity) == (5, 5)  # the third GPU of b is nobody's
    pool = cluster._pool_on_gpus(RayOptions(workers=7, gpus_per_worker=4), gpus)
    assert (pool.size, pool.capacity, pool.nodes) == (7, 2, ("a",))
    with pytest.raises(ClusterError, match="16 GPUs"):
        cluster._pool_on_gpus(RayOptions(gpus_per_worker=16), gpus)


def test_without_gpus_cores_are_shared_evenly() -> None:
    cores = {"head": 0, "a": 8, "b": 4}
    pool = cluster._pool_on_cpus(RayOptions(), cores)
    assert (pool.size, pool.cpus, pool.nodes) == (2, 4, ("a", "b"))
    pool = cluster._pool_on_cpus(RayOptions(workers=3), cores)
    assert (pool.cpus, pool.capacity) == (4, 3)
    pool = cluster._pool_on_cpus(RayOptions(workers=20), cores)
    assert (pool.cpus, pool.capacity) == (1, 12)
    with pytest.raises(ClusterError, match="CPU"):
        cluster._pool_on_cpus(RayOptions(), {"head": 0})


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("how", ["typed", "RAY_ADDRESS", "a file of a head that is gone"])
def test_a_head_that_is_not_there(
    how: str, nobody: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray itself waits for it without end."""
    if how == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", nobody)
    elif how != "typed":
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # those of other tests
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(nobody)
    with (
        pytest.raises(ClusterError, match=nobody) as raised,
        connect(RayOptions(nobody if how == "typed" else "auto")),
    ):
        raise AssertionError("nothing is there to be connected to")
    assert ("RAY_ADDRESS" in raised.value.hint) == (how != "typed")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (
            "Version mismatch: The cluster was started with:\n  Ray: 2.9.0\n  Python: 3.9",
            "2.9.0",
        ),
        ("Authentication token is required", "token"),
        ("something new", "something new"),
    ],
)
def test_what_ray_says_in_words(said: str, named: str) -> None:
    error = cluster._connection_error(RuntimeError(said), RayOptions("head:6379"))
    assert named in error.message
    assert error.hint


def test_ray_speaks_to_nobody_on_stdout() -> None:
    captured = CapturedStdout()
    print(
        "(raylet) A worker died. Worker PID: 7 Worker exit detail: killed by the OOM killer.", file=captured
    )
    print("(raylet) something else", file=captured)
    assert captured.last_worker_exit() == "killed by the OOM killer."


def test_auto_does_not_join_the_cluster_of_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    monkeypatch.setattr("ray.init", lambda *_, **__: None)
    monkeypatch.setattr("ray.shutdown", lambda: left.append(True))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0, cluster._PRIVATE_RESOURCE: 1.0})
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(cluster, "_check_reachable", lambda *_, **__: None)
    with pytest.raises(ClusterError), connect(RayOptions("auto")):
        pytest.fail("it was joined")
    assert left == [True]


def test_threads_of_ray_data_end_before_the_connection() -> None:
    before, released = set(threading.enumerate()), threading.Event()
    reading = threading.Thread(target=time.sleep, args=(0.3,), name=pipeline.RAY_DATA_THREADS[0])
    other = threading.Thread(target=released.wait, name="other", daemon=True)
    for thread in (reading, other):
        thread.start()
    try:
        pipeline._join_ray_data(before)
        assert not reading.is_alive()
        assert other.is_alive()
    finally:
        released.set()
