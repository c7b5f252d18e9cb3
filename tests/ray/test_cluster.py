"""How many workers a cluster has room for, and what its failures are called. No cluster is started."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlfit.errors import ClusterError
from vlfit.tasks.batch.ray import RayOptions, cluster
from vlfit.tasks.batch.ray.cluster import Overheard, connected

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


def test_a_worker_for_each_gpu_or_for_each_few() -> None:
    gpus = {"head": 0, "a": 8, "b": 3}
    team = cluster._team_on_gpus(RayOptions(), gpus)
    assert (team.size, team.gpus, team.nodes) == (11, 1, ("a", "b"))
    team = cluster._team_on_gpus(RayOptions(gpus_per_worker=2), gpus)
    assert (team.size, team.room) == (5, 5)  # the third GPU of b is nobody's
    team = cluster._team_on_gpus(RayOptions(workers=7, gpus_per_worker=4), gpus)
    assert (team.size, team.room, team.nodes) == (7, 2, ("a",))
    with pytest.raises(ClusterError, match="has 16 GPUs"):
        cluster._team_on_gpus(RayOptions(gpus_per_worker=16), gpus)


def test_without_gpus_cores_are_shared_evenly() -> None:
    cores = {"head": 0, "a": 8, "b": 4}
    team = cluster._team_on_cpus(RayOptions(), cores)
    assert (team.size, team.cpus, team.nodes) == (2, 4, ("a", "b"))
    team = cluster._team_on_cpus(RayOptions(workers=3), cores)
    assert (team.cpus, team.room) == (4, 3)
    team = cluster._team_on_cpus(RayOptions(workers=20), cores)
    assert (team.cpus, team.room) == (1, 12)
    with pytest.raises(ClusterError, match="offers a CPU"):
        cluster._team_on_cpus(RayOptions(), {"head": 0})


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
        pytest.raises(ClusterError, match=f"answers at {nobody}") as raised,
        connected(RayOptions(nobody if how == "typed" else "auto")),
    ):
        raise AssertionError("nothing is there to be connected to")
    assert ("RAY_ADDRESS" in raised.value.hint) == (how != "typed")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "Version mismatch: The cluster was started with:\n  Ray: 2.9.0\n  Python: 3.9",
            "has other versions",
        ),
        ("Authentication token is required", "does not let us in"),
        ("something new", "cannot be joined: something new"),
    ],
)
def test_what_ray_says_in_words(said: str, words: str) -> None:
    error = cluster._in_words(RuntimeError(said), RayOptions("head:6379"))
    assert words in error.message
    assert error.hint


def test_ray_speaks_to_nobody_on_stdout() -> None:
    overheard = Overheard()
    print(
        "(raylet) A worker died. Worker PID: 7 Worker exit detail: killed by the OOM killer.", file=overheard
    )
    print("(raylet) something else", file=overheard)
    assert overheard.last_words() == "killed by the OOM killer."


def test_auto_does_not_join_the_cluster_of_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    monkeypatch.setattr("ray.init", lambda *_, **__: None)
    monkeypatch.setattr("ray.shutdown", lambda: left.append(True))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0, cluster._PRIVATE: 1.0})
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(cluster, "_knock", lambda *_, **__: None)
    with pytest.raises(ClusterError, match="another batch"), connected(RayOptions("auto")):
        pytest.fail("it was joined")
    assert left == [True]
