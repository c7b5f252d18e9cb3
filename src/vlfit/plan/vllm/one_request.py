"""Whether a planned KV cache holds one request of the planned context: if not, vLLM refuses to start.

Knows: the one check that vLLM makes of a cache whose size it is told (``check_enough_kv_cache_memory`` of its
``v1/core/kv_cache_utils.py``). Does not know what else a start may fail on.
"""

from typing import TYPE_CHECKING

from vlfit.plan.ledger import VLLM, kv_bytes, pool_tokens
from vlfit.units import format_bytes

if TYPE_CHECKING:
    from vlfit.plan.search import Plan


def too_small(plan: "Plan") -> str:
    """Why vLLM will not start with the KV cache of ``plan``, in a sentence; "" if it holds one request."""
    if plan.backend != VLLM:
        return ""
    context, tokens = plan.settings.context, pool_tokens(VLLM, plan.settings)
    if tokens >= context:
        return ""
    each = kv_bytes(plan.model, VLLM, plan.settings)
    return (
        f"vLLM will not start so: one request of {context} tokens needs a KV cache of "
        f"{format_bytes(context * each)}, and it is given {format_bytes(tokens * each)}, which hold {tokens}."
    )
