"""A cluster of two machines that are one: each a Ray node with processes and a store of its own."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
AT_HOME = "VLFIT_TEST_AT_HOME"  # is set on the first machine alone


@pytest.fixture(autouse=True)
def no_thread_of_ray_data() -> Iterator[None]:
    """After each test no thread of Ray Data uses the connection of this process.

    Ray ends the process, with status 1 and without a word, when one does so after ``ray.shutdown``.
    """
    yield
    if "vlfit.tasks.batch.ray.pipeline" in sys.modules:
        from vlfit.tasks.batch.ray.pipeline import RAY_DATA_THREADS

        left = [thread.name for thread in threading.enumerate() if thread.name.startswith(RAY_DATA_THREADS)]
        assert not left


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a running cluster; this process is part of it. Machines have one core each."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray leaves a token in this user's home
    os.environ["PYTHONPATH"] = str(ROOT)
    machines = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    os.environ[AT_HOME] = "1"
    cluster = Cluster(initialize_head=True, head_node_args=machines)
    del os.environ[AT_HOME]
    try:
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
        try:
            yield cluster.address
        finally:
            ray.shutdown()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
