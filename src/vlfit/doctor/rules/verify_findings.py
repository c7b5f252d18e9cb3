"""What ``vlfit verify`` reports, from its text, its ``--json`` or its ``--share`` block.

One rule for each kind of part that can differ. What helps is said as verify says it.
"""

import re
import shlex

from vlfit.checkpoint.hub import is_hub_name
from vlfit.checkpoint.source import resolve_name
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.errors import VlfitError
from vlfit.parity.findings import WAYS_AROUND, Component

_LIKELY = {
    "kernel": "A kernel computes it wrongly on this device.",
    "file": "The file is damaged, or of another model.",
    "driver": "The driver is most likely at fault: update it.",
    "memory": "Memory does not keep what was written: test it, and undo overclocking.",
    "backend": "The backend has other files or another template, or computes it wrongly.",
    "engine": "It is a defect of vlfit: please report it with `vlfit verify MODEL --json`.",
}
_MODEL_BEFORE = re.compile(
    r'"model": ?"(?P<json>[^"\\]{1,200})"|(?P<text>\S{1,200}) \([\w.]{1,20}\) on [^\n]{1,200}: DIFFERS'
    r"|\| model \| (?P<shared>[^|,\n]{1,200}),"
)
_PULLED = ("file", "template", "tokenizer", "pictures", "stop")  # what a download brings anew


def _pattern(*components: Component) -> str:
    """One finding of the JSON, the line of the report, or the verdict of the block."""
    names = "|".join(sorted((str(each) for each in components), key=len, reverse=True))
    text = r'"(?:[^"\\]|\\.){0,1000}"'
    return (
        rf'"code": ?"(?P<code>\w{{1,60}})", ?"component": ?"(?P<component>{names})", ?'
        r'"stage": ?"(?P<stage>[^"\\]{1,200})", ?"condition": ?"(?P<condition>[^"\\]{0,200})", ?'
        rf'"likely": ?"(?P<likely>\w{{1,20}})", ?"note": ?{text}'
        r'(?:, ?"(?:measured|tolerance|unit)": ?[^{},]{0,80}){0,3}, ?"way_around": ?'
        r'(?:null|"(?P<way>(?:[^"\\]|\\.){0,400})")'
        rf"|\bdiffers {{4,12}}(?P<component2>{names}), at (?P<stage2>[^\s,]{{1,200}}), (?P<condition2>"
        r"[^:|]{1,100}?)(?=:| {6,}| likely| also differs|$)"
        rf"|\| verdict \| (?P<code3>\w{{1,60}}): (?P<component3>{names}), (?P<stage3>[^|,]{{1,200}}), "
        r"(?P<condition3>[^|]{0,100}?) ?\|"
    )


def _group(finding: Finding, name: str) -> str:
    groups = finding.match.groups
    return next((groups[each] for each in (name, f"{name}2", f"{name}3") if groups.get(each)), "")


def _model(finding: Finding) -> str:
    """The model that the report is about, MODEL if it is not named."""
    named = list(_MODEL_BEFORE.finditer(finding.match.lines_above))
    return name_for_commands(next(group for group in named[-1].groups() if group)) if named else "MODEL"


def name_for_commands(model: str) -> str:
    """``model``; MODEL if no command finds it by that name: of a folder verify knows its last part alone."""
    try:
        resolve_name(model)
    except VlfitError:
        return "MODEL"
    return model


def _values(finding: Finding) -> TemplateValues:
    component, model = _group(finding, "component"), _model(finding)
    way = _group(finding, "way").replace('\\"', '"') or WAYS_AROUND.get(Component(component), "")
    way = f"{way[:1].upper()}{way[1:]}. " if way else ""
    likely = _LIKELY.get(_group(finding, "likely"), "")
    likely = f"{likely} " if likely else ""
    pulls = component in _PULLED and is_hub_name(model)
    return {
        "component": component.replace("_", " "),
        "stage": _group(finding, "stage"),
        "condition": _group(finding, "condition").strip(),
        "way": way.replace("MODEL", model),
        "likely": likely.replace("MODEL", model),
        "again": f"vlfit pull {shlex.quote(model)} --verify"
        if pulls
        else f"vlfit verify {shlex.quote(model)}",
    }


def _sound(finding: Finding) -> TemplateValues:
    model = _group(finding, "model")
    return {"name": model, "quoted": shlex.quote(name_for_commands(model))}


def _rule(name: str, cause: str, remedy: str, *components: Component) -> Rule:
    return Rule(
        id=f"verify.{name}",
        keywords=('"component"', "differs    ", "| verdict |"),
        pattern=_pattern(*components),
        cause=f"vlfit verify: {cause}",
        remedy=remedy,
        command="{again}",
        compute=_values,
        first_counts=True,  # what differs later follows from it
    )


VERIFY = (
    _rule(
        "file",
        "the file {stage} is not what it should be.",
        "{way}If it is the same again, test the disk and the memory.",
        Component.FILE,
    ),
    _rule(
        "prompt",
        "the {component} gives other words than the checkpoint's own ({stage}).",
        "{way}If it is the same again, it is a defect of vlfit: please report it.",
        Component.TEMPLATE,
        Component.TOKENIZER,
        Component.STOP,
    ),
    _rule(
        "pictures",
        "{component} differ from those that the model was trained with, at {stage}.",
        "{way}{likely}",
        Component.PICTURES,
        Component.BOXES,
    ),
    _rule(
        "numbers",
        "the engine computes {stage} ({component}) otherwise than the reference, {condition}.",
        "{way}{likely}Update the driver, and verify again.",
        Component.POSITIONS,
        Component.TOWER,
        Component.MERGER,
        Component.DEEPSTACK,
        Component.EMBEDDING,
        Component.ATTENTION,
        Component.DELTA_NET,
        Component.MLP,
        Component.NORM,
        Component.ROPE,
        Component.HEAD,
        Component.SAMPLER,
    ),
    _rule(
        "conditions",
        "the same prompt has another answer: {condition} ({component}).",
        "{way}{likely}",
        Component.KV_CACHE,
        Component.PREFIX_CACHE,
        Component.SCHEDULER,
        Component.SPECULATION,
        Component.CUDA_GRAPHS,
        Component.SLEEP,
    ),
    _rule(
        "device",
        "the GPU or its driver failed while a check ran ({stage}).",
        "{way}{likely}Start the computer anew if no program can use the GPU.",
        Component.DEVICE,
    ),
    _rule(
        "unfinished",
        "a check could not be made: {stage}.",
        "Close other programs, and verify again. {likely}",
        Component.MEMORY,
        Component.SPEED,
    ),
    Rule(
        id="verify.ok",
        keywords=('"ok"', ": ok"),
        pattern=(
            r'"ok": ?true, ?"model": ?"(?P<model>[^"\\]{1,200})"'
            r"|(?P<model2>\S{1,200}) \([\w.]{1,20}\) on .{1,200}?: ok words {4,}\d"
        ),
        cause="vlfit verify found nothing that differs: {name}.",
        remedy=(
            "Nothing is wrong by this report. If answers are wrong all the same, please report the question, "
            "the picture and `vlfit verify --json`."
        ),
        command="vlfit verify {quoted} --full",
        compute=_sound,
        wrapper=True,
    ),
)
