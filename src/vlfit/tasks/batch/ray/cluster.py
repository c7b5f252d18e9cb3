"""A Ray cluster: found or started, what it has room for, and its machines asked what they have.

Knows Ray's start and end, and what a person can do when either fails. Does not know what a batch is made of.
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
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray._private.services import get_ray_address_from_environment
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlfit._version import __version__
from vlfit.backends.opening import Wanted
from vlfit.checkpoint import hub
from vlfit.checkpoint.config import ModelConfig, no_eyes
from vlfit.checkpoint.source import MINI, Checkpoint, locate
from vlfit.errors import ClusterError, VlfitError
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.ray import AUTO, LOCAL, RayOptions
from vlfit.units import MIB

# What a machine of the cluster has: vlfit, the model's files, the pictures. Asked before a model is loaded.
#
# Knows files and versions. Does not know how the question travels to a machine (``cluster.py``).


_SAMPLES = 3  # pictures that a machine is asked for
_LOOKED_AT = 64  # items at most among which readable ones are sought


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture and what its bytes are where the batch was started. None: they need not be the same, as of an
    address on the network.
    """

    item: Item
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a machine answered. ``lacking``: why the model cannot be opened there, if so. ``unread``: the key
    of a sample that it has not, or has otherwise.
    """

    node: str
    version: str
    lacking: VlfitError | None
    unread: str | None


def samples_of(items: Iterable[Item]) -> tuple[Sample, ...] | None:
    """The first pictures that can be read here; there may be none among the first of many. None: no items."""
    found: list[Sample] = []
    first = list(islice(items, _LOOKED_AT))
    if not first:
        return None
    for item in first:
        with suppress(VlfitError):
            data = item.read()
            found.append(Sample(item, _digest(data) if item.path is not None else None))
        if len(found) == _SAMPLES:
            break
    return tuple(found)


def look(wanted: Wanted, samples: tuple[Sample, ...], folder: str) -> Sight:
    """Answer for the machine that this runs on."""
    with suppress(OSError):
        os.chdir(folder)
    unread = next((sample.item.key for sample in samples if not _has(sample)), None)
    return Sight(platform.node(), __version__, missing_model(wanted), unread)


def missing_model(wanted: Wanted) -> VlfitError | None:
    """Why this machine cannot open the model; None if nothing says so yet. Fetches nothing: that a hundred
    machines each download the same gigabytes is nobody's wish.
    """
    if wanted.kind == "remote":
        return None
    name = str(wanted.model)
    if hub.is_hub_name(name) and not Path(name).expanduser().is_dir():
        # A backend may want other files than ours; the config is there if any of them are.
        folder = hub.cached_folder(name, hub.any_model(lambda folder: folder))
        if folder is None:
            return ClusterError(
                f"{platform.node()} does not have {name}",
                f"run there: vlfit pull {name}; or give a folder that all machines see",
            )
    else:
        try:
            _, folder = locate(name)
        except VlfitError as error:
            return ClusterError(
                f"{platform.node()} cannot open the model: {error.message}",
                "give a folder that all machines see, or the name of a model that each has pulled",
            )
    return _without_eyes(name, folder) if wanted.kind == "native" else None


def _without_eyes(name: str, folder: Path) -> VlfitError | None:
    try:
        return no_eyes(name) if ModelConfig.read(folder).vision is None else None
    except VlfitError as error:
        return error


def other_version(node: str, theirs: str, ours: str) -> ClusterError:
    """Records of two versions may differ: all machines need the same."""
    return ClusterError(
        f"{node} has vlfit {theirs}, and the batch was started by {ours}",
        f"install the same there: pip install vlfit=={ours}",
    )


def for_elsewhere(wanted: Wanted) -> Wanted:
    """``wanted`` as other machines take it: its folder by the absolute path, as a relative one means another
    place there; and nobody in this process to tell things to.
    """
    if wanted.kind == "remote" or wanted.model is None:
        return wanted
    model = wanted.model
    if isinstance(model, Checkpoint):
        everywhere = model.name == MINI or hub.is_hub_name(model.name)
        model = model.name if everywhere else model.folder
    path = Path(model).expanduser()
    vllm = None if wanted.vllm is None else replace(wanted.vllm, tell=None)
    return replace(wanted, model=str(path.resolve()) if path.is_dir() else str(model), vllm=vllm)


def _has(sample: Sample) -> bool:
    try:
        data = sample.item.read()
    except VlfitError:
        return False
    return sample.digest is None or _digest(data) == sample.digest


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


_KNOCK_S = 5.0  # for a head's port to open: on a network that works it takes milliseconds
_LOOK_S = 120.0  # for a machine to start Python, import vlfit and read three pictures
# What travels through the store of a cluster that we start are names and answers: its one machine reads its
# pictures itself.
_LOCAL_STORE = 256 * MIB
# Marks such a cluster, so that nobody's ``auto`` takes it for one that is there to be joined: Ray would.
_PRIVATE = "vlfit-private"
_NO_CLUSTER = "start one with `ray start --head`, or use --ray local for one of this machine alone"


class Overheard(io.TextIOBase):
    """Takes what Ray says on stdout, where nothing but answers belongs, and keeps the last of it."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=20)

    def write(self, text: str) -> int:
        self._lines.extend(line.strip() for line in text.splitlines() if line.strip())
        return len(text)

    def last_words(self) -> str:
        """The last line about a worker that died, shortened; empty if there was none."""
        told = next((line for line in reversed(self._lines) if "Worker exit detail" in line), "")
        return told.partition("Worker exit detail:")[2].strip()[:300]


@dataclass(frozen=True, slots=True)
class Team:
    """``size`` workers, each with so many GPUs and CPUs; ``nodes`` are the ids of machines that can hold one,
    ``room`` how many fit on what is there now.
    """

    size: int
    room: int
    gpus: int
    cpus: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Connected to. ``home`` is the id of the machine that this process runs on."""

    home: str
    overheard: Overheard

    def team(self, options: RayOptions, device: str) -> Team:
        """How many workers there are to be, and what each takes. ``device``: ``cpu`` for none with a GPU.

        Raises ``ClusterError`` if no machine has room for one.
        """
        machines: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        total = {
            node["NodeID"]: (int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0)))
            for node in machines
        }
        if device != "cpu" and (any(gpus for gpus, _ in total.values()) or device != AUTO):
            return _team_on_gpus(options, {node: gpus for node, (gpus, _) in total.items()})
        return _team_on_cpus(options, {node: cpus for node, (_, cpus) in total.items()})

    def free(self, team: Team) -> int:
        """How many workers' worth of GPUs or cores nobody has taken now, anywhere in the cluster."""
        have: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return int(have.get("GPU", 0)) // team.gpus if team.gpus else int(have.get("CPU", 0)) // team.cpus

    def look(self, team: Team, wanted: Wanted, samples: tuple[Sample, ...]) -> list[Sight]:
        """What each machine that may get a worker has. Raises ``ClusterError`` for one that cannot say."""
        asked = ray.remote(num_cpus=0, max_retries=1)(look)
        folder = os.getcwd()
        answers = [
            asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                wanted, samples, folder
            )
            for node in team.nodes
        ]
        end = time.monotonic() + _LOOK_S
        return [_sight(answer, node, end) for answer, node in zip(answers, team.nodes, strict=True)]


def _sight(answer: "ray.ObjectRef[Sight]", node: str, end: float) -> Sight:
    """What ``node`` says, if it does until ``end``."""
    try:
        return ray.get(answer, timeout=max(0.0, end - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(
            f"{_name_of(node)} did not answer within {_LOOK_S:g} s",
            "look at `ray status` and at the load of that machine",
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"{_name_of(node)} cannot run vlfit: {_last_line(error)}",
            "install the same vlfit in the Python that `ray start` runs in, on every machine",
        ) from error


def _name_of(node: str) -> str:
    """What a person calls the machine with that id."""
    machines: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for machine in machines:
        if machine["NodeID"] == node:
            return f"{machine['NodeManagerHostname']} ({machine['NodeManagerAddress']})"
    return "a machine that has left the cluster"


def _team_on_gpus(options: RayOptions, gpus: dict[str, int]) -> Team:
    each = options.gpus_per_worker
    fitting = {node: count // each for node, count in gpus.items() if count >= each}
    room = sum(fitting.values())
    if not room:
        raise ClusterError(
            f"no machine of the cluster has {each} GPU{'s' if each > 1 else ''} (see `ray status`)",
            "start Ray where the GPUs are; or --device cpu",
        )
    return Team(options.workers or room, room, each, 0, tuple(fitting))


def _team_on_cpus(options: RayOptions, cpus: dict[str, int]) -> Team:
    """One worker for each machine unless told otherwise, each with as many cores as leave room for all."""
    able = {node: count for node, count in cpus.items() if count}
    if not able:
        raise ClusterError("no machine of the cluster offers a CPU or a GPU", "look at `ray status`")
    size = options.workers or len(able)
    each = max(able.values())
    while each > 1 and sum(count // each for count in able.values()) < size:
        each -= 1
    fitting = {node: count // each for node, count in able.items() if count >= each}
    return Team(size, sum(fitting.values()), 0, each, tuple(fitting))


@contextlib.contextmanager
def connected(options: RayOptions) -> Iterator[Cluster]:
    """The cluster that ``options`` name, for as long as the block lasts. If this process is part of one
    already it is that one, and stays so. Raises ``ClusterError``.
    """
    overheard = Overheard()
    with contextlib.redirect_stdout(overheard):
        ours = not ray.is_initialized()
        if ours:
            _start(options)
            _be_quiet()
        try:
            yield Cluster(ray.get_runtime_context().get_node_id(), overheard)
        finally:
            if ours:
                ray.shutdown()


def _start(options: RayOptions) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    meant = _meant(options)
    endpoint = meant.endpoint()
    if endpoint is not None:
        _knock(*endpoint, found=meant is not options)
    try:
        with _own_signals():
            if meant.address == LOCAL:
                ray.init(
                    "local",
                    include_dashboard=False,
                    object_store_memory=_LOCAL_STORE,
                    resources={_PRIVATE: 1},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            else:
                ray.init(meant.address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds, of its own and of the system
        raise _in_words(error, meant) from error
    if options.address == AUTO and _PRIVATE in ray.cluster_resources():  # type: ignore[no-untyped-call]
        ray.shutdown()
        raise ClusterError(
            "the only Ray cluster found here is that of another batch with --ray local, and ends with it",
            _NO_CLUSTER,
        )


def _meant(options: RayOptions) -> RayOptions:
    """``options`` with the address that ``auto`` stands for. Ray would find it too; but it may be that of a
    head which is gone (RAY_ADDRESS, or a file that nobody took away), and that is to be known at once.
    """
    if options.address != AUTO:
        return options
    try:
        return replace(options, address=get_ray_address_from_environment(AUTO, None))
    except ConnectionError as error:
        raise ClusterError("there is no Ray cluster that this machine is part of", _NO_CLUSTER) from error


def _knock(host: str, port: int, *, found: bool) -> None:
    """Ray waits for a head that is not there: for minutes, without a word. ``found``: nobody typed it."""
    try:
        socket.create_connection((host, port), timeout=_KNOCK_S).close()
    except OSError as error:
        where = "; RAY_ADDRESS or the last `ray start` here names this address" if found else ""
        raise ClusterError(
            f"no Ray cluster answers at {host}:{port} ({error.strerror or error})", _NO_CLUSTER + where
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts. It stays what it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _be_quiet() -> None:
    """What Ray logs goes to its files alone: of what concerns a batch we tell in our own words."""
    for name in ("ray", "ray.data"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.CRITICAL + 1)


def _in_words(error: Exception, options: RayOptions) -> ClusterError:
    text = str(error)
    if "ersion mismatch" in text:
        return ClusterError(
            f"the cluster has other versions: {' '.join(text.split())}",
            "all machines need the same Python and Ray; "
            f"here: Python {sys.version.split()[0]}, Ray {ray.__version__}",
        )
    if "uthenticat" in text or "oken" in text:
        return ClusterError(
            f"the cluster does not let us in: {_last_line(error)}",
            "set RAY_AUTH_MODE and RAY_AUTH_TOKEN (or ~/.ray/auth_token) as on the cluster's head",
        )
    what = (
        "a Ray cluster cannot be started here" if options.address == LOCAL else "the cluster cannot be joined"
    )
    return ClusterError(f"{what}: {_last_line(error)}", "its logs are in /tmp/ray/session_latest/logs")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
