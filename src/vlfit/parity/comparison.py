"""The engine beside the reference, stage by stage in the way of a request: what differs, and which part it
is.

Every step is compared by itself, computed by the reference from the engine's own input to it: then errors of
earlier steps do not count, the tolerance is that of one step, and what is wrong is wrong there. If all steps
agree the prompt's result does. Decoding is compared by its logits along the engine's own tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlfit.api.conversation import Conversation
from vlfit.checkpoint.source import Checkpoint
from vlfit.models.interface import Grid
from vlfit.parity.engine_trace import EngineTrace, Trace
from vlfit.parity.findings import CheckReport, Component, Finding, Likely, Measured, with_way_around
from vlfit.parity.stored_files import explain_prompt_difference, first_difference
from vlfit.parity.tolerances import EXACT, Difference, Precision, Tolerance, difference

PREFILL, DECODE = "prefill", "decode"
_LARGEST = 2.0**63  # float32 has no square of a larger number, and every norm takes squares


class Reference(Protocol):
    """A checkpoint computed in float32, as a whole or one step at a time."""

    def trace(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        *,
        image_tokens: int | None = None,
        perturb: float = 0.0,
        keep: Callable[[str], bool] | None = None,
    ) -> Trace:
        """Stages of ``conversation`` followed by the tokens ``forced``, in one pass.

        ``image_tokens``: limit for a picture. ``perturb``: every layer's output is changed at random by as
        much, relative to each row. ``keep``: which stages to return; None: all.
        """
        ...

    def traces(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        perturbs: Sequence[float],
        *,
        image_tokens: int | None = None,
        keep: Callable[[str], bool] | None = None,
        beside: Callable[[str], None] | None = None,
    ) -> list[Trace]:
        """``trace`` for each of ``perturbs``.

        ``beside``: may be called with the name of a stage while what it was computed from is at hand.
        """
        ...

    def layer(self, name: str, inputs: Mapping[str, Tensor]) -> Trace:
        """One step, such as ``layer.3`` or ``tower.merged``, from ``inputs``: its output and sub-stages."""
        ...


@dataclass
class Comparison:
    """The engine's trace (``ours``) beside the ``reference`` of a ``checkpoint``; findings go to ``report``.

    ``precision``: what the engine computes in, from which tolerances follow. Set ``ours`` before calling the
    functions below.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    reference: Reference
    precision: Precision
    report: CheckReport
    ours: EngineTrace = field(default_factory=EngineTrace)

    def stage(
        self,
        code: str,
        component: Component,
        stage: str,
        theirs: Tensor,
        ours: Tensor,
        tolerance: Tolerance,
        *,
        condition: str = PREFILL,
        likely: Likely = Likely.KERNEL,
        note: str = "",
    ) -> bool:
        """Compare one stage, and return whether it agrees; if not, a ``Finding`` is added to the report.

        ``theirs``: the reference's tensor; ``ours``: the engine's, which may have only its last rows.
        ``code``, ``component``, ``condition``, ``likely``, ``note``: of that finding.
        """
        if ours.shape != theirs.shape and ours.ndim == theirs.ndim == 2 and len(ours) < len(theirs):
            theirs = theirs[-len(ours) :] if len(ours) else theirs[:0]  # rows with logits alone
        if not self._usable(stage, condition, theirs, computed=likely is Likely.KERNEL):
            return False
        apart = difference(ours, theirs)
        share = apart.share(tolerance)
        by_element = tolerance.element > 0 and apart.element / tolerance.element >= share
        value, limit = (apart.element, tolerance.element) if by_element else (apart.row, tolerance.row)
        self.report.measured.append(Measured(stage, condition, value, limit, "relative"))
        if share <= 1.0:
            return True
        if ours.shape != theirs.shape:
            value = float("inf")
            note = f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}. {note}".strip()
        elif bad := int((~ours.isfinite()).sum()):
            value = float("inf")
            note = f"{bad:,} of {ours.numel():,} numbers are NaN or infinite, in the reference none"
        elif apart.worst_row is not None and not note:
            note = f"worst in row {apart.worst_row} of {len(ours)}"
        self.add(Finding(code, component, stage, condition, likely, note, value, limit, "relative"))
        return False

    def _usable(self, stage: str, condition: str, theirs: Tensor, *, computed: bool) -> bool:
        """Whether the reference's numbers can be compared with; if not, the file's weights are damaged.

        ``computed``: from weights, so that nothing but zeros means weights of zero. After another finding
        nothing is said: this stage was computed from what differs there.
        """
        bad = int((~(theirs.abs() <= _LARGEST)).sum())
        if not bad and (not computed or not theirs.numel() or bool(theirs.any())):
            return True
        if self.report.ok:
            what = (
                f"{bad:,} of {theirs.numel():,} numbers are NaN, infinite or near it" if bad else "all are 0"
            )
            note = f"weights of this part are damaged: computed from them in float32, {what}"
            code = "weights_not_finite" if bad else "weights_are_zero"
            self.add(Finding(code, Component.FILE, stage, condition, Likely.FILE, note))
        return False

    def add(self, finding: Finding) -> None:
        """Add ``finding`` to the report; without a ``way_around`` it gets the one known for its component."""
        self.report.findings.append(with_way_around(finding))


def compare_request(
    comparison: Comparison, conversation: Conversation, image_tokens: int | None
) -> Tolerance:
    """Compare a whole request: pixels, tokens, positions, then layer by layer, then decoding.

    One pass of the reference does it: each step is compared as that pass has come to it, so that no layer's
    weights are dequantized twice. ``image_tokens``: limit for a picture, as the engine had it; None: the
    checkpoint's own. Returns the tolerance of logits after all layers, which checks of the engine against
    itself use, too.
    """

    def is_input(name: str) -> bool:
        return name in ("tokens", "positions") or name.startswith(("pixels", "patches"))

    theirs = comparison.reference.trace(conversation, (), image_tokens=image_tokens, keep=is_input)
    _compare_pixels(comparison, theirs)
    _compare_tokens(comparison, theirs)
    _compare_positions(comparison, theirs)
    steps = _steps(comparison)

    def compare_step(name: str) -> None:
        for step in steps.pop(name, ()):
            step()

    def is_logits(name: str) -> bool:
        return name == "logits" or name.startswith("forced.")

    limit = comparison.precision.layer(comparison.checkpoint)
    forced = comparison.ours.generated[:-1]
    try:
        exact, changed = comparison.reference.traces(
            conversation,
            forced,
            (0.0, limit.row),
            image_tokens=image_tokens,
            keep=is_logits,
            beside=compare_step,
        )
    finally:
        for name in tuple(steps):
            compare_step(name)
    return _compare_decoding(comparison, exact, changed, limit)


def _steps(comparison: Comparison) -> dict[str, list[Callable[[], None]]]:
    """What is compared once the reference has come to a stage, by its name, in the way of a request."""
    ours, steps = comparison.ours, dict[str, list[Callable[[], None]]]()

    def add(stage: str, compare: Callable[..., None], *arguments: int) -> None:
        steps.setdefault(stage, []).append(partial(compare, comparison, *arguments))

    if "tower.layer.0.hidden" in ours.stages:
        add("tower.embedding", _compare_tower_embedding)
        for index in range(ours.tower_layers):
            add(f"tower.layer.{index}", _compare_tower_block, index)
        add("tower.merged", _compare_deepstack_levels)
        for level, after in enumerate(ours.deepstack_after):
            add(f"tower.deepstack.{level}", _compare_deepstack, level, after)
        add("tower.merged", _compare_merger)
    add("embedding", _compare_embedding)
    for index in range(ours.text_layers):
        add(f"layer.{index}", _compare_layer, index)
    add("norm", _compare_norm)
    add("logits", _compare_logits)
    return steps


def _compare_pixels(comparison: Comparison, theirs: Trace) -> None:
    for name in sorted(name for name in theirs if name.startswith("pixels")):
        ours = comparison.ours.stages.get(name)
        mine = torch.empty(0) if ours is None else ours
        comparison.stage(
            "pixels_differ", Component.PICTURES, name, theirs[name], mine, EXACT, likely=Likely.PROCESSOR
        )
    parts = [theirs[name] for name in sorted(theirs, key=_picture_number) if name.startswith("patches")]
    if parts and "patches" in comparison.ours.stages:
        comparison.stage(
            "patches_differ",
            Component.PICTURES,
            "patches",
            torch.cat(parts),
            comparison.ours.stages["patches"],
            comparison.precision.patches(),
            likely=Likely.PROCESSOR,
        )


def _picture_number(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def _compare_tokens(comparison: Comparison, theirs: Trace) -> None:
    """Token ids are equal or not: by what differs it is the template, the tokenizer or the pictures."""
    mine, right = comparison.ours.stages["tokens"].tolist(), theirs["tokens"].tolist()
    comparison.report.measured.append(Measured("tokens", PREFILL, float(mine != right), 0.0, "differ"))
    if mine == right:
        return
    config = comparison.checkpoint.config
    images = {config.image_token_id, config.video_token_id}
    at = first_difference(mine, right)
    note = f"{len(mine)} tokens, not {len(right)}; the first that differs is number {at}"
    words = [[token for token in ids if token not in images] for ids in (mine, right)]
    if words[0] == words[1]:
        code, component, likely = "image_tokens_differ", Component.PICTURES, Likely.PROCESSOR
    else:
        code, component, likely = explain_prompt_difference(comparison.tokenizer, *words)
    comparison.add(Finding(code, component, "tokens", PREFILL, likely, note, float(at), None, "token"))


def _compare_positions(comparison: Comparison, theirs: Trace) -> None:
    ours, right = comparison.ours.stages["positions"], theirs["positions"]
    # The first token of an answer follows the largest position of the prompt on any axis.
    rows = {"positions": (right.T, ours.T)}
    if right.numel():
        rows["next_position"] = (right.max()[None] + 1, comparison.ours.stages["next_position"])
    for name, (theirs_here, ours_here) in rows.items():
        wide, mine = theirs_here.double(), ours_here.double()
        comparison.stage(
            "positions_differ", Component.POSITIONS, name, wide, mine, EXACT, likely=Likely.ENGINE
        )


def _per_picture(comparison: Comparison, name: str, merge: int = 1) -> Iterator[tuple[Grid, Tensor]]:
    """The rows of a tower stage by temporal patch, with the grid of each."""
    start, rows = 0, comparison.ours.stages[name]
    for time, height, width in comparison.ours.grids:
        for _ in range(time):
            count = height * width // merge
            yield (1, height, width), rows[start : start + count]
            start += count


def _tower_step(comparison: Comparison, name: str, source: str, given: str) -> Trace:
    """``Reference.layer`` of a tower stage for every picture, joined."""
    parts: dict[str, list[Tensor]] = {}
    for grid, rows in _per_picture(comparison, source):
        out = comparison.reference.layer(name, {given: rows, "grid": torch.tensor(grid)})
        for key, value in out.items():
            parts.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in parts.items()}


def _compare_tower_embedding(comparison: Comparison) -> None:
    limit, name = comparison.precision.tower(comparison.checkpoint), "tower.embedding"
    out = _tower_step(comparison, name, "patches", "patches")["out"]
    comparison.stage("tower_differs", Component.TOWER, name, out, comparison.ours.stages[name], limit)


def _compare_tower_block(comparison: Comparison, index: int) -> None:
    ours, limit = comparison.ours.stages, comparison.precision.tower(comparison.checkpoint)
    name = f"tower.layer.{index}"
    steps = _tower_step(comparison, name, f"{name}.hidden", "hidden")
    for part in ("attention", "mlp"):
        if part in steps and not comparison.stage(
            "tower_differs", Component.TOWER, f"{name}.{part}", steps[part], ours[f"{name}.{part}"], limit
        ):
            return
    comparison.stage("tower_differs", Component.TOWER, name, steps["out"], ours[name], limit)


def _compare_deepstack_levels(comparison: Comparison) -> None:
    """After which blocks levels are taken."""
    ours = comparison.ours
    wanted = comparison.checkpoint.config.required_vision.deepstack_visual_indexes
    comparison.report.measured.append(
        Measured("tower.deepstack", PREFILL, float(ours.deepstack_after != wanted), 0.0, "differ")
    )
    if ours.deepstack_after != wanted:
        note = f"levels are taken after blocks {list(ours.deepstack_after)}, not {list(wanted)}"
        stage = "tower.deepstack"
        comparison.add(Finding("deepstack_differs", Component.DEEPSTACK, stage, PREFILL, Likely.ENGINE, note))


def _compare_deepstack(comparison: Comparison, level: int, after: int) -> None:
    """``after``: the block whose output enters the level's merger."""
    ours, limit = comparison.ours.stages, comparison.precision.tower(comparison.checkpoint)
    name = f"tower.deepstack.{level}"
    if name in ours:
        out = _tower_step(comparison, name, f"tower.layer.{after}", "hidden")["out"]
        comparison.stage("deepstack_differs", Component.DEEPSTACK, name, out, ours[name], limit)


def _compare_merger(comparison: Comparison) -> None:
    ours, limit = comparison.ours, comparison.precision.tower(comparison.checkpoint)
    name = "tower.merged"
    out = _tower_step(comparison, name, f"tower.layer.{ours.tower_layers - 1}", "hidden")["out"]
    comparison.stage("merger_differs", Component.MERGER, name, out, ours.stages[name], limit)


def _placeholders(comparison: Comparison) -> Tensor:
    config = comparison.checkpoint.config
    ids = [token for token in (config.image_token_id, config.video_token_id) if token is not None]
    return torch.isin(comparison.ours.stages["tokens"], torch.tensor(ids, dtype=torch.int64))


def _compare_embedding(comparison: Comparison) -> None:
    stages = comparison.ours.stages
    tokens = stages["tokens"]
    visual = _placeholders(comparison)
    expected = comparison.reference.layer("embedding", {"tokens": tokens})["out"].clone()
    if "tower.merged" in stages and int(visual.sum()) == len(stages["tower.merged"]):
        expected[visual] = stages["tower.merged"]
    comparison.stage(
        "embedding_differs",
        Component.EMBEDDING,
        "embedding",
        expected,
        stages["embedding"],
        comparison.precision.lookup(),
        likely=Likely.FILE,
    )


# Sub-stages of a text layer in the order in which they are computed, and the part that each names.
_TEXT_PARTS = (
    ("input_norm", Component.NORM),
    ("value", Component.ATTENTION),
    ("key", Component.ROPE),
    ("attention", Component.ATTENTION),
    ("post_norm", Component.NORM),
    ("mlp", Component.MLP),
    ("out", Component.MLP),
)


def _compare_layer(comparison: Comparison, index: int) -> None:
    """Compare one text layer; the first of its parts that differs is named."""
    stages, name = comparison.ours.stages, f"layer.{index}"
    inputs = {"hidden": stages[f"{name}.hidden"], "positions": stages["positions"]}
    steps = comparison.reference.layer(name, inputs)
    is_state = "value" not in steps
    seen = len(stages["tokens"]) if is_state else 0
    limit = comparison.precision.layer(comparison.checkpoint, seen)
    for part, component in _TEXT_PARTS:
        mine = stages.get(f"{name}.{part}")
        if mine is None or part not in steps:
            continue
        if part == "attention" and is_state:
            component = Component.DELTA_NET
        if part == "key":
            normed = comparison.checkpoint.config.text.query_key_norm
            component = _key_component(steps[part], mine, limit, normed=normed)
        if part in ("key", "value") and _some_rows(steps[part], mine, limit):
            component = Component.KV_CACHE
        right = steps[part]
        if part in ("key", "value"):
            right, mine = right.flatten(1), mine.flatten(1)
        if not comparison.stage("layer_differs", component, f"{name}.{part}", right, mine, limit):
            return
    _compare_deepstack_add(comparison, index, limit)


def _some_rows(theirs: Tensor, ours: Tensor, limit: Tolerance) -> bool:
    """Whether rows of the KV cache differ and at least as many do not: a wrong weight would change all."""
    if ours.shape != theirs.shape or len(ours) < 2:
        return False
    right = [difference(a[None], b[None]).share(limit) <= 1.0 for a, b in zip(ours, theirs, strict=True)]
    return len(ours) > sum(right) >= len(ours) / 2


def _key_component(theirs: Tensor, ours: Tensor, limit: Tolerance, *, normed: bool) -> Component:
    """The part that made keys [tokens, heads, head_dim] wrong: RoPE, their norm, or what is before it.

    RoPE leaves position 0 as it is. A norm multiplies a head by one number and each of its elements by a
    weight that all heads share: then the logarithm of the ratio is a sum of the two. Without a norm
    (``normed`` false) one number for all is the factor of LongRoPE's tables.
    """
    if ours.shape != theirs.shape:
        return Component.KV_CACHE
    mine, right = ours[0], theirs[0]
    if difference(mine, right).share(limit) <= 1.0:
        return Component.ROPE
    if len(right) > 1 and not bool(((mine * right) <= 0).any()):
        ratio = (mine / right).double().log()
        rest = ratio - ratio.mean(0) - ratio.mean(1, keepdim=True) + ratio.mean()
        if float(rest.abs().max()) <= 100 * limit.element:
            return Component.NORM if normed else Component.ROPE
    return Component.ATTENTION


def _compare_deepstack_add(comparison: Comparison, index: int, limit: Tolerance) -> None:
    """What is added between a layer and the next: the rows of its deepstack level, or nothing."""
    stages = comparison.ours.stages
    after, before = stages.get(f"layer.{index + 1}.hidden"), stages.get(f"layer.{index}.out")
    if after is None or before is None or before.shape != after.shape:
        return
    expected = before.clone()
    rows = stages.get(f"tower.deepstack.{index}")
    visual = _placeholders(comparison)
    if rows is not None and int(visual.sum()) == len(rows):
        expected[visual] += rows
    comparison.stage(
        "deepstack_differs",
        Component.DEEPSTACK,
        f"layer.{index}",
        expected,
        after,
        limit,
        likely=Likely.ENGINE,
    )


def _compare_norm(comparison: Comparison) -> None:
    stages, last = comparison.ours.stages, comparison.ours.text_layers - 1
    limit = comparison.precision.layer(comparison.checkpoint)
    out = comparison.reference.layer("norm", {"hidden": stages[f"layer.{last}.out"]})["out"]
    comparison.stage("norm_differs", Component.NORM, "norm", out, stages["norm"], limit)


def _compare_logits(comparison: Comparison) -> None:
    """The output head, and the tokens chosen from its logits."""
    stages = comparison.ours.stages
    if "logits" not in stages:  # the request failed before
        return
    limit = comparison.precision.layer(comparison.checkpoint)
    out = comparison.reference.layer("logits", {"hidden": stages["norm"][-1:]})["out"]
    logits = stages["logits"][None]
    comparison.stage("logits_differ", Component.HEAD, "logits", out[:, : logits.shape[1]], logits, limit)
    names = ["logits", *(f"forced.{step}" for step in range(len(comparison.ours.generated) - 1))]
    for name, token in zip(names, comparison.ours.generated, strict=bool(comparison.ours.generated)):
        row = stages[name]
        if float(row.max()) > float(row[token]):
            note = f"token {token} was chosen, the largest logit is of {int(row.argmax())}"
            comparison.add(
                Finding("greedy_token_differs", Component.SAMPLER, name, "greedy", Likely.KERNEL, note)
            )
            return


def _compare_decoding(comparison: Comparison, exact: Trace, changed: Trace, step: Tolerance) -> Tolerance:
    """Compare the logits along the engine's own tokens with the reference forced to the same tokens.

    ``exact``, ``changed``: the reference's, and those of its run whose layers are changed at random by the
    tolerance of one ``step``. Stops at the first position that differs. Returns the tolerance of logits.
    """
    apart = [difference(changed[name][None], exact[name][None]) for name in exact]
    worst = Difference(max(each.row for each in apart), max(each.element for each in apart))
    tolerance = step.deep(worst)
    stages = comparison.ours.stages
    if "logits" not in stages:  # the request failed before
        return tolerance
    agrees = comparison.stage(
        "logits_differ", Component.HEAD, "logits", exact["logits"][None], stages["logits"][None], tolerance,
        condition="whole prompt", note="every step agrees by itself, the whole does not",
    )  # fmt: skip
    for number in range(len(comparison.ours.generated) - 1):
        name = f"forced.{number}"
        if not comparison.stage(
            "decoding_differs",
            Component.KV_CACHE if agrees else Component.HEAD,
            name,
            exact[name][None],
            stages[name][None],
            tolerance,
            condition=DECODE,
            note=f"token {number + 1} of the answer; the prompt's logits agree" if agrees else "",
        ):
            break
    return tolerance


def compare_kv_rows(comparison: Comparison) -> None:
    """Compare keys and values as the KV cache holds them with the reference's, layer by layer.

    The reference gets the engine's own hidden states, so that only rounding to the cache's dtype may differ.
    Stops at the first layer that does.
    """
    stages = comparison.ours.stages
    limit = comparison.precision.kv_rows(comparison.checkpoint)
    for index in range(comparison.ours.text_layers):
        name = f"layer.{index}"
        if f"{name}.key" not in stages:
            continue
        inputs = {"hidden": stages[f"{name}.hidden"], "positions": stages["positions"]}
        steps = comparison.reference.layer(name, inputs)
        for part in ("value", "key"):
            stage = f"{name}.{part}"
            if not comparison.stage(
                "kv_rows_differ",
                Component.KV_CACHE,
                stage,
                steps[part],
                stages[stage],
                limit,
                condition="FP8 KV",
            ):
                return
