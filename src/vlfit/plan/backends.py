"""The registry of backends that plans are made for: name to ``CostModel``."""

from vlfit.errors import UsageError
from vlfit.machine.model import Machine
from vlfit.plan.cost_model import CostModel
from vlfit.plan.native.cost_model import NativeCosts
from vlfit.plan.native.cpu_cost_model import CpuCosts
from vlfit.plan.plans import Plan
from vlfit.plan.processors import is_ram
from vlfit.plan.transformers.cost_model import TransformersCosts
from vlfit.plan.vllm.cost_model import COSTS as _VLLM
from vlfit.plan.wishes import Wishes, option_name

NATIVE: CostModel = NativeCosts()  # where no backend is named
CPU: CostModel = CpuCosts()  # the native engine without a GPU
VLLM: CostModel = _VLLM
TRANSFORMERS: CostModel = TransformersCosts()
_COSTS = {costs.name: costs for costs in (NATIVE, VLLM, TRANSFORMERS)}


def cost_model(backend: str | None) -> CostModel:
    """The cost model of ``backend`` (native, vllm or transformers); None: of the native engine.

    Raises ``UsageError`` for another name.
    """
    if backend is None:
        return NATIVE
    if backend not in _COSTS:
        raise UsageError(
            f"--backend is {backend!r}", f"Plans are made for {', '.join(_COSTS)}.", param="backend"
        )
    return _COSTS[backend]


def cost_model_on(wishes: Wishes, machine: Machine) -> CostModel:
    """The cost model of ``wishes.backend`` on ``machine``: the native engine's is another one on a CPU.

    That is without a GPU, and if ``wishes.device`` asks for it. Raises as ``check_wishes``.
    """
    costs = cost_model(check_wishes(wishes).backend)
    if costs is not NATIVE or (wishes.device is None and machine.gpus):
        return costs
    CPU.check_wishes(wishes)
    return CPU


def cost_model_of(plan: Plan) -> CostModel:
    """The cost model that ``plan`` was made with."""
    costs = cost_model(plan.backend)
    return CPU if costs is NATIVE and is_ram(plan.gpu) else costs


def check_wishes(wishes: Wishes) -> Wishes:
    """Check ``wishes`` against ``wishes.backend`` and return them unchanged.

    Raises ``UsageError`` for an unknown backend, for an option that only another backend has, and for what
    the backend's own ``CostModel.check_wishes`` refuses.
    """
    costs = cost_model(wishes.backend)
    costs.check_wishes(wishes)
    if wishes.device is not None and costs is TRANSFORMERS:
        raise UsageError(
            "there is no plan for transformers on a CPU", "Leave out --backend or --device.", param="device"
        )
    for other in _COSTS.values():
        for name, what in other.options.items():
            if getattr(wishes, name) and other is not costs:
                raise _not_an_option(what, name, other, costs)
    return wishes


def _not_an_option(what: str, name: str, owner: CostModel, chosen: CostModel) -> UsageError:
    if owner is NATIVE:
        hint = f"Leave out --backend, or {option_name(name)}."
        return UsageError(f"{what}, and the backend is {chosen.name}", hint, param=name)
    return UsageError(what, f"Add --backend {owner.name}.", param=name)
