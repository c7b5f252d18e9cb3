"""``quantization_config`` of AutoRound (quant_method ``auto-round``), whose tensors lie as AWQ's or GPTQ's.

Knows: which of both ``packing_format`` means, and ``extra_config``, which says by name what differs for some
modules; both as vLLM's ``AutoRoundConfig`` reads them. Does not know: tensors (``by_inputs.py`` does).
"""

from vlfit.checkpoint.awq import read_awq, unknown
from vlfit.checkpoint.by_inputs import ByInputs, Stored
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gptq import read_gptq

AUTO_ROUND_METHODS = ("auto-round", "intel/auto-round")
_PLAIN_BITS = 16


def read_auto_round(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    packing = section.text("packing_format", "auto_round:auto_gptq")
    readers = {"auto_gptq": read_gptq, "gptq": read_gptq, "auto_awq": read_awq, "awq": read_awq}
    program, _, layout = packing.rpartition(":")
    if program not in ("", "auto_round") or layout not in readers:
        raise unknown(section, "packing_format", packing)
    if section.text("data_type", "int") != "int":
        raise unknown(section, "data_type", section.values["data_type"])
    if section.integer("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise unknown(section, "act_bits", section.values["act_bits"])
    reader = readers[layout]
    others: list[tuple[str, Stored | None]] = []
    extra = section.section("extra_config")
    for name in extra.values:
        changed = extra.section(name)
        kept = changed.integer("bits", section.integer("bits")) >= _PLAIN_BITS
        others.append((f"(?:{name})$", None if kept else reader(_as_one(section, changed)).most))
    form = reader(_as_one(section, Fields({}, section.file, section.prefix)))
    return ByInputs(form.most, form.codes, form.zeros, tuple(others))


def _as_one(section: Fields, changed: Fields) -> Fields:
    """``section`` with what ``changed`` says in its place, in the words of AWQ and GPTQ."""
    values = {name: section.values.get(name) for name in ("bits", "group_size", "sym")}
    said = {name: value for name, value in changed.values.items() if value is not None}
    return Fields({**values, "desc_act": False, **said}, section.file, changed.prefix)
