"""Downloads that requests begin (``--pull``): models of the catalog, one at a time; then served."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from vlfit.errors import DoesNotFit, HubError, ModelDownloading, VlfitError
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.models.served_models import Pull, is_plain_name

if TYPE_CHECKING:
    from vlfit.checkpoint.source import ResolvedModel

log = logging.getLogger("vlfit.server")

RETRY_SECONDS = 30  # suggested to clients; many ignore more than 60
FAILURE_SECONDS = 30.0  # until a download that failed is begun again


class Pulls:
    """Downloads by name. Belongs to one event loop.

    ``serve``: called on the event loop with the name of a model that is here now; raises what keeps it from
    being served.
    """

    def __init__(self, serve: Callable[[str], None]) -> None:
        self._serve = serve
        self._thread = DaemonThreadPool(1)
        self._known: dict[str, Pull] = {}  # by the name that the request used, as the catalog spells it
        self._running: asyncio.Task[None] | None = None

    def start(self, name: str) -> Pull | None:
        """Begin to download the model ``name``, or return the download that runs for it or has just failed.

        None if the catalog has no such model. Raises ``ModelDownloading`` if another is being downloaded.
        """
        found = _in_catalog(name.removesuffix(":latest"))
        if not found:
            return None
        key = " ".join(each.name for each in found)
        known = self._known.get(key)
        if known is not None and not known.ended.is_set():
            return known
        if known is not None and known.error and time.monotonic() - known.ended_at < FAILURE_SECONDS:
            return known
        other = next((pull for pull in self._known.values() if not pull.ended.is_set()), None)
        if other is not None:
            raise ModelDownloading(
                f"{other.name} is being downloaded ({other.in_words()}), one model at a time",
                f"Try again in {RETRY_SECONDS} s.",
                retry_after=RETRY_SECONDS,
            )
        pull = self._known[key] = Pull(found[0].name)
        self._running = asyncio.get_running_loop().create_task(self._run(pull, found))
        return pull

    async def _run(self, pull: Pull, found: "Sequence[ResolvedModel]") -> None:
        try:
            name = await self._thread.run(_download, pull, found)
            self._serve(name)
            log.info("%s was downloaded, and is served now", name)
        except Exception as error:
            known = isinstance(error, VlfitError)
            pull.error = (
                error if isinstance(error, VlfitError) else HubError(f"the download failed: {error!r}"[:300])
            )
            log.warning("%s cannot be served: %s", pull.name, pull.error, exc_info=not known)
        finally:
            pull.ended_at = time.monotonic()
            pull.ended.set()


def downloading_error(pull: Pull) -> VlfitError:
    """The error of a request for a model whose download has begun: try again later; or why it failed."""
    if pull.error is not None:
        return pull.error.with_traceback(None)
    return ModelDownloading(
        f"{pull.name} is being downloaded: {pull.in_words()}",
        f"Try again in {RETRY_SECONDS} s; POST /api/pull shows the progress.",
        retry_after=RETRY_SECONDS,
    )


@lru_cache(maxsize=256)
def _in_catalog(name: str) -> "tuple[ResolvedModel, ...]":
    """The checkpoints of the catalog on the hub that ``name`` means; empty for any other name."""
    from vlfit.checkpoint.source import resolve_name

    if not is_plain_name(name):
        return ()
    try:
        return tuple(each for each in resolve_name(name) if each.entry is not None and each.on_hub)
    except VlfitError:
        return ()


def _download(pull: Pull, found: "Sequence[ResolvedModel]") -> str:
    """Download the one of ``found`` that fits best here; returns its name. Raises ``DoesNotFit``."""
    from vlfit.checkpoint.source import locate_or_download
    from vlfit.machine.survey import survey
    from vlfit.plan.ledger import held_by_others
    from vlfit.plan.model_choice import choose_format
    from vlfit.plan.model_lookup import find_exact_models
    from vlfit.plan.planner import find_plan
    from vlfit.plan.wishes import Wishes

    machine = survey()
    one = found[0] if len(found) == 1 else choose_format(found, machine)
    pull.name = one.name
    if machine.gpus:
        plan = find_plan(find_exact_models(one.name), machine, Wishes())
        # What served models hold now is free when they sleep.
        if plan.total - held_by_others(plan.gpu) > plan.gpu.total - plan.gpu.desktop:
            raise DoesNotFit(f"{one.name} does not fit on {plan.gpu.name}", "Name a smaller model.")

    def progress(done: int, total: int) -> None:
        pull.done, pull.total = done, total

    name, _ = locate_or_download(one.name, progress)
    return name
