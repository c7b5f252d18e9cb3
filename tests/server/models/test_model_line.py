"""The line for models: who is brought up when, at whose expense, and what happens if that fails."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from vlfit.api.engine_options import SleepLevel
from vlfit.api.stats import SleepResult, SleepState
from vlfit.errors import CannotWake, DoesNotFit, EngineStopped
from vlfit.server.models.model_line import Hold, ModelLine, State, Switchable

PATIENCE = 30.0  # seconds, which only pass where something is wrong


@dataclass
class World:
    """Memory of ``room`` units, and what happened to it."""

    room: int = 1
    events: list[tuple[str, str]] = field(default_factory=list)
    changing: int = 0
    models: dict[str, "Model"] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        return sum(model.size for model in self.models.values() if model.state != "sleeping" and model.here)

    async def fits(self, model: Switchable, others: Sequence[Switchable]) -> bool:
        assert self.taken == sum(self.models[each.name].size for each in others)
        return self.taken + self.models[model.name].size <= self.room


@dataclass
class Model:
    """A model that comes and goes as the test says; ``errors`` are raised by ``bring_up``, in turn."""

    name: str
    world: World
    size: int = 1
    here: bool = False
    was_here: bool = False
    errors: list[Exception] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.world.models[self.name] = self
        self.go_on.set()

    @property
    def state(self) -> State:
        if self.here:
            return "ready"
        return "sleeping" if self.was_here else "unloaded"

    async def bring_up(self) -> None:
        await self._change("up")
        if self.errors:
            raise self.errors.pop(0)
        assert not self.here
        assert self.world.taken + self.size <= self.world.room, "two models where one fits"
        self.here = self.was_here = True

    async def put_down(self, level: SleepLevel) -> SleepResult:
        await self._change("down")
        changed, self.here = self.here, False
        return SleepResult(SleepState("files", 0, 0, 0.0), changed, 0.0)

    async def _change(self, what: str) -> None:
        self.world.events.append((what, self.name))
        self.world.changing += 1
        assert self.world.changing == 1, "two changes at a time"
        await self.go_on.wait()
        await asyncio.sleep(0.001)
        self.world.changing -= 1


def line_of(world: World, *names: str, stay: float = 0.0, grace: float = 0.0, **more: Any) -> ModelLine:
    models = [world.models.get(name) or Model(name, world) for name in names]
    return ModelLine(models, world.fits, min_stay=stay, idle_grace=grace, **more)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE):
            await test()

    asyncio.run(within())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def use(line: ModelLine, name: str, then: Callable[[], Awaitable[None]] | None = None) -> None:
    hold = await line.acquire(name)
    if then is not None:
        await then()
    hold.close()


def test_models_come_and_go_one_at_a_time() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b")
        assert line.state("a") == "unloaded"
        for name in ("a", "b", "a", "a"):
            await use(line, name)
        assert world.events == [
            ("up", "a"),
            *(("down", "a"), ("up", "b")),
            *(("down", "b"), ("up", "a")),
        ]
        assert (line.state("a"), line.state("b"), line.num_changes) == ("ready", "sleeping", 3)

    run(test)


def test_what_fits_together_stays_together_and_the_least_recently_used_goes() -> None:
    async def test() -> None:
        world = World(room=2)
        line = line_of(world, "a", "b", "c")
        for name in ("a", "b", "a", "c"):
            await use(line, name)
            await asyncio.sleep(0.005)  # the clock tells them apart
        assert world.events == [("up", "a"), ("up", "b"), ("down", "b"), ("up", "c")]

    run(test)


def test_a_large_model_makes_several_go() -> None:
    async def test() -> None:
        world = World(room=2)
        Model("large", world, size=2)
        line = line_of(world, "a", "b", "large")
        for name in ("a", "b", "large"):
            await use(line, name)
        assert set(world.events[2:4]) == {("down", "a"), ("down", "b")}
        assert world.taken == 2

    run(test)


def test_all_who_wait_for_a_model_go_in_together_and_in_order_of_the_first() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b", "c")
        first = await line.acquire("a")
        order: list[str] = []

        async def ask(name: str) -> None:
            hold = await line.acquire(name)
            order.append(name)
            await asyncio.sleep(0.01)
            hold.close()

        asked = []
        for name in ("b", "c", "b", "c", "b"):
            asked.append(asyncio.ensure_future(ask(name)))
            await asyncio.sleep(0)
        assert line.waiting("b") == 3
        first.close()
        await asyncio.gather(*asked)
        assert order == ["b", "b", "b", "c", "c"]
        assert line.num_changes == 3

    run(test)


def test_nobody_starves_beside_a_model_in_constant_use() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b", stay=0.05)
        stop = False

        async def keep_using() -> int:
            served = 0
            while not stop:
                async with asyncio.TaskGroup() as overlapping:
                    for _ in range(3):
                        overlapping.create_task(use(line, "a", lambda: asyncio.sleep(0.004)))
                        await asyncio.sleep(0.002)
                served += 3
            return served

        users = [asyncio.ensure_future(keep_using()) for _ in range(3)]
        await until(lambda: line.state("a") == "ready")
        for _ in range(3):
            await use(line, "b")
            await until(lambda: line.state("a") == "ready")
        stop = True
        assert all(served > 0 for served in await asyncio.gather(*users))

    run(test)


def test_a_model_in_use_stays_for_the_minimum() -> None:
    stay = 0.3

    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b", stay=stay, grace=0.01)

        async def keep_using(until_done: "asyncio.Future[None]") -> None:
            while not until_done.done():
                await use(line, "a", lambda: asyncio.sleep(0.002))

        await use(line, "a")
        began = time.monotonic()
        other = asyncio.ensure_future(use(line, "b"))
        await keep_using(other)
        assert time.monotonic() - began >= stay * 0.9

    run(test)


def test_an_idle_model_goes_before_its_stay_is_over() -> None:
    async def test() -> None:
        line = line_of(World(), "a", "b", stay=10 * PATIENCE, grace=0.01)
        for name in ("a", "b", "a"):  # each would stay for longer than the test may last
            await use(line, name)

    run(test)


def test_running_requests_are_never_cut_off() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b", clock=lambda: 0.0)
        hold = await line.acquire("a", 2)
        other = asyncio.ensure_future(line.acquire("b"))
        await asyncio.sleep(0.02)
        assert (world.events, line.state("a")) == ([("up", "a")], "ready")
        hold.release_one()
        await asyncio.sleep(0.02)
        assert not other.done()
        late = asyncio.ensure_future(line.acquire("a"))  # the gate is closed: it waits its turn
        await asyncio.sleep(0.02)
        assert not late.done()
        hold.release_one()
        (await other).close()
        (await late).close()
        hold.close()
        assert world.events[1:] == [("down", "a"), ("up", "b"), ("down", "b"), ("up", "a")]

    run(test)


def test_leaving_the_line_changes_nothing() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b", clock=lambda: 0.0)
        hold = await line.acquire("a")
        waiting = asyncio.ensure_future(line.acquire("b"))
        await until(lambda: line.waiting("b") == 1)
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(line.acquire("a"))
        await asyncio.sleep(0.01)
        assert not late.done()
        waiting.cancel()
        (await late).close()  # the gate is open again, without a change
        hold.close()
        assert (line.waiting("b"), world.events) == (0, [("up", "a")])
        await use(line, "b")

    run(test)


def test_a_client_that_leaves_during_its_change_leaves_no_hold() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b")
        model = world.models["b"]
        model.go_on.clear()
        waiting = asyncio.ensure_future(line.acquire("b"))
        await until(lambda: line.state("b") == "loading")
        waiting.cancel()
        model.go_on.set()
        await until(lambda: line.state("b") == "ready")
        assert line.in_use("b") == 0
        await use(line, "a")

    run(test)


def test_failure_is_told_to_all_who_wait_and_the_old_model_comes_back() -> None:
    async def test() -> None:
        world = World()
        Model("b", world, errors=[CannotWake("no memory", "try again")])
        line = line_of(world, "a", "b")
        await use(line, "a")
        told = await asyncio.gather(line.acquire("b"), line.acquire("b"), return_exceptions=True)
        assert [type(each) for each in told] == [CannotWake, CannotWake]
        await use(line, "a")
        assert world.events == [("up", "a"), ("down", "a"), ("up", "b"), ("up", "a")]
        # Asking again at once does not make the other model go again.
        with pytest.raises(CannotWake):
            await line.acquire("b")
        assert len(world.events) == 4

    run(test)


def test_a_failed_model_is_tried_again_later() -> None:
    async def test() -> None:
        world, now = World(), 0.0
        Model("b", world, errors=[CannotWake("no memory")])
        line = line_of(world, "a", "b", clock=lambda: now)
        with pytest.raises(CannotWake):
            await line.acquire("b")
        now += 60.0
        await use(line, "b")

    run(test)


def test_an_error_that_is_a_bug_is_told_too() -> None:
    async def test() -> None:
        world = World()
        Model("b", world, errors=[ZeroDivisionError("oh")])
        line = line_of(world, "b")
        with pytest.raises(EngineStopped):
            await line.acquire("b")

    run(test)


def test_short_memory_despite_the_plan_evicts_one_more() -> None:
    async def test() -> None:
        world = World(room=2)
        Model("c", world, errors=[DoesNotFit("too large by some bytes")])
        line = ModelLine(
            [Model("a", world), Model("b", world), world.models["c"]],
            lambda model, others: asyncio.sleep(0, len(others) < 2),
            min_stay=0.0,
            idle_grace=0.0,
        )
        for name in ("a", "b", "c"):
            await use(line, name)
        assert world.events[2:] == [("down", "a"), ("up", "c"), ("down", "b"), ("up", "c")]

    run(test)


def test_closing_during_a_change_fails_all_who_wait() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", "b")
        world.models["b"].go_on.clear()
        await use(line, "a")
        waiting = [asyncio.ensure_future(line.acquire(name)) for name in ("b", "b")]
        await until(lambda: line.state("b") == "loading")
        line.close()
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in told] == [EngineStopped, EngineStopped]
        with pytest.raises(EngineStopped):
            await line.acquire("a")

    run(test)


def test_sleep_waits_for_requests_and_the_next_one_wakes() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a")
        hold = await line.acquire("a")
        sleeping = asyncio.ensure_future(line.sleep("a"))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(line.acquire("a"))
        await asyncio.sleep(0.01)
        assert not sleeping.done()
        assert not late.done()
        hold.close()
        assert (await sleeping).changed
        (await late).close()
        assert world.events == [("up", "a"), ("down", "a"), ("up", "a")]
        assert not (await line.wake("a")).changed

    run(test)


def test_sleep_withdrawn_lets_those_in_who_waited() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a")
        hold = await line.acquire("a")
        sleeping = asyncio.ensure_future(line.sleep("a"))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(line.acquire("a"))
        await asyncio.sleep(0.01)
        sleeping.cancel()
        (await late).close()
        hold.close()
        assert world.events == [("up", "a")]

    run(test)


def test_an_idle_model_sleeps_by_itself() -> None:
    async def test() -> None:
        world = World()
        line = line_of(world, "a", idle_sleep=0.05)
        await use(line, "a")
        await until(lambda: line.state("a") == "sleeping")
        await use(line, "a")
        line.close()

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_at_random_are_all_served_by_their_model(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        world = World(room=rng.choice((1, 2)))
        Model("large", world, size=world.room)
        line = line_of(world, "a", "b", "c", "large", stay=0.01, grace=0.002)
        served = 0

        async def ask(name: str) -> None:
            nonlocal served
            await asyncio.sleep(rng.random() * 0.2)
            hold: Hold = await line.acquire(name)
            try:
                for _ in range(3):
                    assert world.models[name].here, "gone while in use"
                    await asyncio.sleep(rng.random() * 0.002)
            finally:
                hold.close()
            served += 1

        tasks = [asyncio.ensure_future(ask(rng.choice(("a", "b", "c", "large")))) for _ in range(120)]
        gone = rng.sample(tasks, 20)
        for task in gone:
            await asyncio.sleep(0.005)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [each for each in results if each is not None]
        assert all(isinstance(each, asyncio.CancelledError) for each in failed)
        assert served + len(failed) == 120
        assert all(line.in_use(name) == 0 for name in world.models)

    run(test)
