"""Connect to a Ray cluster or start one, size its worker pool, and inspect its nodes.

Before a model is loaded, each node reports its version of vlfit and whether it has the model and the same
pictures. Errors of Ray become ``ClusterError`` with a hint.
"""

import contextlib
import io
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray._private.services import get_ray_address_from_environment
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlfit._version import __version__
from vlfit.backends.opening import BackendSpec
from vlfit.checkpoint import hub
from vlfit.checkpoint.config import text_only_error
from vlfit.checkpoint.source import MINI, Checkpoint, locate_or_download
from vlfit.errors import ClusterError, VlfitError
from vlfit.models.registry import read_config
from vlfit.tasks.batch.items import Item, digest_of
from vlfit.tasks.batch.ray import AUTO, LOCAL, RayOptions
from vlfit.units import MIB, counted

_MAX_SAMPLES = 3  # pictures that a node is asked to read
_SAMPLE_CANDIDATES = 64  # items to search for readable ones
_CONNECT_TIMEOUT_S = 5.0  # for the head's port; it takes milliseconds if the network works
_INSPECT_TIMEOUT_S = 120.0  # for a node to start Python, import vlfit and read the samples
_LOCAL_STORE_BYTES = 256 * MIB  # a local cluster's object store only holds names and answers
# Resource that marks a local cluster, as Ray's ``auto`` would otherwise let another batch join it.
_PRIVATE_RESOURCE = "vlfit-private"
_START_HINT = "Start one with `ray start --head`, or use --ray local for one on this machine."


@dataclass(frozen=True, slots=True)
class PictureSample:
    """A picture that each node tries to read, to see whether it has the driver's files.

    ``digest``: ``digest_of`` the picture as the driver read it; None if the bytes need not be the same, as of
    URLs.
    """

    item: Item
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node of the cluster reports about itself. ``node``: its host name; ``version``: of its vlfit.

    ``model_error``: why the node cannot open the model; None if it can. ``missing_picture``: key of the first
    sample that the node cannot read, or that differs there; None if there is none.
    """

    node: str
    version: str
    model_error: VlfitError | None
    missing_picture: str | None


def read_samples(items: Iterable[Item]) -> tuple[PictureSample, ...] | None:
    """Read up to 3 pictures, the first readable ones of the first 64 items, as samples for ``inspect_node``.

    Empty if none of these items can be read; None if there are no items at all.
    """
    found: list[PictureSample] = []
    first = list(islice(items, _SAMPLE_CANDIDATES))
    if not first:
        return None
    for item in first:
        with suppress(VlfitError):
            data = item.read()
            found.append(PictureSample(item, digest_of(data) if item.path is not None else None))
        if len(found) == _MAX_SAMPLES:
            break
    return tuple(found)


def inspect_node(spec: BackendSpec, samples: tuple[PictureSample, ...], folder: str) -> NodeReport:
    """Examine the node that this process runs on: version, model, and whether it can read ``samples``.

    Changes the process's working directory to ``folder``, if that exists.
    """
    with suppress(OSError):
        os.chdir(folder)
    unread = next((sample.item.key for sample in samples if not _is_same_picture(sample)), None)
    return NodeReport(platform.node(), __version__, find_model_error(spec), unread)


def find_model_error(spec: BackendSpec) -> VlfitError | None:
    """Why this machine cannot open the model of ``spec``; None if it probably can, or the backend is remote.

    Looks for the files and reads the config, not the weights. Downloads nothing, as a hundred machines would
    each fetch the same gigabytes.
    """
    if spec.kind == "remote":
        return None
    name = str(spec.model)
    if hub.is_hub_name(name) and not Path(name).expanduser().is_dir():
        # Backends need different files, but all need the config.
        folder = hub.cached_folder(name, hub.transformers_files(lambda folder: folder))
        if folder is None:
            return ClusterError(
                f"{platform.node()} does not have {name}",
                f"Run vlfit pull {name} there, or name a folder that all machines share.",
            )
    else:
        try:
            _, folder = locate_or_download(name)
        except VlfitError as error:
            return ClusterError(
                f"{platform.node()} cannot open the model: {error.message}",
                "Name a folder that all machines share, or a model that each has pulled.",
            )
    return _text_only_error(name, folder) if spec.kind == "native" else None


def _text_only_error(name: str, folder: Path) -> VlfitError | None:
    try:
        return text_only_error(name, folder) if read_config(folder).vision is None else None
    except VlfitError as error:
        return error


def version_error(node: str, theirs: str, ours: str) -> ClusterError:
    """The error for a ``node`` whose vlfit is version ``theirs``, while the driver's is ``ours``."""
    return ClusterError(
        f"{node} has vlfit {theirs}, but the batch was started by {ours}",
        f"Install the same version there: pip install vlfit=={ours}.",
    )


def portable_spec(spec: BackendSpec) -> BackendSpec:
    """``spec`` to pickle for other machines: a folder of a model as an absolute path, and without callbacks.

    A model that each machine has by name (the mini model, or of the Hugging Face Hub) stays a name.
    """
    if spec.kind == "remote" or spec.model is None:
        return spec
    model = spec.model
    if isinstance(model, Checkpoint):
        everywhere = model.name == MINI or hub.is_hub_name(model.name)
        model = model.name if everywhere else model.folder
    path = Path(model).expanduser()
    vllm = None if spec.vllm is None else replace(spec.vllm, on_status=None)
    return replace(spec, model=str(path.resolve()) if path.is_dir() else str(model), vllm=vllm)


def _is_same_picture(sample: PictureSample) -> bool:
    try:
        data = sample.item.read()
    except VlfitError:
        return False
    return sample.digest is None or digest_of(data) == sample.digest


class CapturedStdout(io.TextIOBase):
    """A text stream to replace stdout, on which Ray prints: stdout is for answers only. Keeps the last 20
    lines.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=20)

    def write(self, text: str) -> int:
        """Keep the lines of ``text``; blank ones are dropped. Returns its length."""
        self._lines.extend(line.strip() for line in text.splitlines() if line.strip())
        return len(text)

    def last_worker_exit(self) -> str:
        """Ray's last message about a worker that died, at most 300 characters; empty if there was none."""
        last = next((line for line in reversed(self._lines) if "Worker exit detail" in line), "")
        return last.partition("Worker exit detail:")[2].strip()[:300]


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a run: ``size`` of them, each with ``gpus`` GPUs and ``cpus`` cores (one of the two is
    0).

    ``capacity``: how many such workers have room in the idle cluster at once, which may be less than
    ``size``. ``nodes``: ids of the nodes that have room for at least one.
    """

    size: int
    capacity: int
    gpus: int
    cpus: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected Ray cluster. ``home``: the id of this machine's node; ``stdout``: what Ray printed."""

    home: str
    stdout: CapturedStdout

    def plan_worker_pool(self, options: RayOptions, device: str) -> WorkerPool:
        """Decide on the number of workers and their resources, for an idle cluster. Reserves nothing.

        ``device``: ``cpu``: workers without a GPU; ``auto``: workers with GPUs if the cluster has any; other:
        workers with GPUs. Raises ``ClusterError`` if no machine can run a worker.
        """
        machines: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        total = {
            node["NodeID"]: (int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0)))
            for node in machines
        }
        if device != "cpu" and (any(gpus for gpus, _ in total.values()) or device != AUTO):
            return _pool_on_gpus(options, {node: gpus for node, (gpus, _) in total.items()})
        return _pool_on_cpus(options, {node: cpus for node, (_, cpus) in total.items()})

    def free_slots(self, pool: WorkerPool) -> int:
        """How many workers of ``pool`` the GPUs or cores that are free now would suffice for.

        Counted over the whole cluster, as if they were on one machine.
        """
        have: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return int(have.get("GPU", 0)) // pool.gpus if pool.gpus else int(have.get("CPU", 0)) // pool.cpus

    def inspect_nodes(
        self, pool: WorkerPool, spec: BackendSpec, samples: tuple[PictureSample, ...]
    ) -> list[NodeReport]:
        """Run ``inspect_node`` on each node of ``pool``, in parallel. The reports are in the order of
        ``pool.nodes``.

        Raises ``ClusterError`` if a node does not report within 120 s, or cannot run vlfit.
        """
        task = ray.remote(num_cpus=0, max_retries=1)(inspect_node)
        folder = os.getcwd()
        reports = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                spec, samples, folder
            )
            for node in pool.nodes
        ]
        end = time.monotonic() + _INSPECT_TIMEOUT_S
        return [_node_info(report, node, end) for report, node in zip(reports, pool.nodes, strict=True)]


def _node_info(report: "ray.ObjectRef[NodeReport]", node: str, end: float) -> NodeReport:
    """The report of ``node``, until the deadline ``end``."""
    try:
        return ray.get(report, timeout=max(0.0, end - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(
            f"{_node_name(node)} did not report within {_INSPECT_TIMEOUT_S:g} s",
            "Check ray status and the load of that machine.",
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"{_node_name(node)} cannot run vlfit: {_last_line(error)}",
            "On every machine, install the same vlfit into the Python environment of `ray start`.",
        ) from error


def _node_name(node: str) -> str:
    """Host name and address of the node with that id."""
    machines: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for machine in machines:
        if machine["NodeID"] == node:
            return f"{machine['NodeManagerHostname']} ({machine['NodeManagerAddress']})"
    return "a machine that has left the cluster"


def _pool_on_gpus(options: RayOptions, gpus: dict[str, int]) -> WorkerPool:
    gpus_each = options.gpus_per_worker
    fitting = {node: count // gpus_each for node, count in gpus.items() if count >= gpus_each}
    room = sum(fitting.values())
    if not room:
        raise ClusterError(
            f"no machine of the cluster has {counted(gpus_each, 'GPU')} (see `ray status`)",
            "Start Ray on the machines with GPUs, or use --device cpu.",
        )
    return WorkerPool(options.workers or room, room, gpus_each, 0, tuple(fitting))


def _pool_on_cpus(options: RayOptions, cpus: dict[str, int]) -> WorkerPool:
    """By default one worker per machine, with as many cores as leave enough for all workers."""
    usable = {node: count for node, count in cpus.items() if count}
    if not usable:
        raise ClusterError("no machine of the cluster offers a CPU or a GPU", "Check ray status.")
    size = options.workers or len(usable)
    cpus_each = max(usable.values())
    while cpus_each > 1 and sum(count // cpus_each for count in usable.values()) < size:
        cpus_each -= 1
    fitting = {node: count // cpus_each for node, count in usable.items() if count >= cpus_each}
    return WorkerPool(size, sum(fitting.values()), 0, cpus_each, tuple(fitting))


@contextlib.contextmanager
def connect(options: RayOptions) -> Iterator[Cluster]:
    """Connect to a Ray cluster, or start one, for the duration of the block. Raises ``ClusterError``.

    If this process is connected to one already, that connection is used and kept, and ``options`` are
    ignored. What is printed to stdout in the block goes to ``Cluster.stdout``.
    """
    captured = CapturedStdout()
    with contextlib.redirect_stdout(captured):
        connected_here = not ray.is_initialized()
        if connected_here:
            _start(options)
            _silence_ray()
        try:
            yield Cluster(ray.get_runtime_context().get_node_id(), captured)
        finally:
            if connected_here:
                ray.shutdown()


def _start(options: RayOptions) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    resolved = _resolve_auto(options)
    endpoint = resolved.endpoint()
    if endpoint is not None:
        _check_reachable(*endpoint, found=resolved is not options)
    try:
        with _keep_sigterm_handler():
            if resolved.address == LOCAL:
                ray.init(
                    "local",
                    include_dashboard=False,
                    object_store_memory=_LOCAL_STORE_BYTES,
                    resources={_PRIVATE_RESOURCE: 1},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            else:
                ray.init(resolved.address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds of errors
        raise _connection_error(error, resolved) from error
    if options.address == AUTO and _PRIVATE_RESOURCE in ray.cluster_resources():  # type: ignore[no-untyped-call]
        ray.shutdown()
        raise ClusterError(
            "the only Ray cluster found here belongs to another batch with --ray local, and ends with it",
            _START_HINT,
        )


def _resolve_auto(options: RayOptions) -> RayOptions:
    """``options`` with the address that ``auto`` stands for.

    Ray would find it itself, but it may be stale (RAY_ADDRESS, or a left-over file), which has to be noticed
    at once.
    """
    if options.address != AUTO:
        return options
    try:
        return replace(options, address=get_ray_address_from_environment(AUTO, None))
    except ConnectionError as error:
        raise ClusterError("this machine is not part of a Ray cluster", _START_HINT) from error


def _check_reachable(host: str, port: int, *, found: bool) -> None:
    """Check that the head answers, as Ray would wait silently for minutes. ``found``: it was not typed."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        where = " RAY_ADDRESS or the last `ray start` here names this address." if found else ""
        raise ClusterError(
            f"no Ray cluster answers at {host}:{port} ({error.strerror or error})", _START_HINT + where
        ) from error


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _silence_ray() -> None:
    """Let Ray log to its files only: vlfit reports what concerns the batch."""
    for name in ("ray", "ray.data"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.CRITICAL + 1)


def _connection_error(error: Exception, options: RayOptions) -> ClusterError:
    text = str(error)
    if "ersion mismatch" in text:
        return ClusterError(
            f"the cluster has different versions: {' '.join(text.split())}",
            "Install the same Python and Ray on all machines; "
            f"here they are Python {sys.version.split()[0]} and Ray {ray.__version__}.",
        )
    if "uthenticat" in text or "oken" in text:
        return ClusterError(
            f"the cluster refused the connection: {_last_line(error)}",
            "Set RAY_AUTH_MODE and RAY_AUTH_TOKEN (or ~/.ray/auth_token) as on the head.",
        )
    what = (
        "a Ray cluster cannot be started here" if options.address == LOCAL else "the cluster cannot be joined"
    )
    return ClusterError(f"{what}: {_last_line(error)}", "Its logs are in /tmp/ray/session_latest/logs.")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
