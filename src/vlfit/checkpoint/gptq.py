"""``quantization_config`` of GPTQ checkpoints, as AutoGPTQ, GPTQModel and optimum write them.

Knows: its fields, the two ways to store a zero point (``gptq`` has it less one, ``gptq_v2`` as it is; see
``convert_gptq_v1_to_v2_format`` of GPTQModel), and ``dynamic``, which says what differs for some modules.
Does not know: tensors (``by_inputs.py`` does).
"""

from vlfit.checkpoint.awq import group_size, named, unknown
from vlfit.checkpoint.by_inputs import ByInputs, Stored
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.headers import Layout

GPTQ_METHOD = "gptq"
_ZEROS = {"gptq": Layout.ONE_LESS, "gptq_v2": Layout.TRANSPOSED}
# With one of these the model computes something else than its weights say.
_MORE_THAN_WEIGHTS = ("activation", "adapter", "rotation", "is_marlin_format")
_LEFT_OUT, _ALSO = "-:", "+:"


def read_gptq(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    name = named(section, "checkpoint_format", "format")
    written = section.text(name, "gptq")
    if written not in _ZEROS:
        raise unknown(section, name, written)
    for name in _MORE_THAN_WEIGHTS:
        if section.values.get(name):
            raise unknown(section, name, section.values[name])
    if str(section.values.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise unknown(section, "pack_dtype", section.values["pack_dtype"])
    most = _stored(section)
    return ByInputs(most, Layout.TRANSPOSED, _ZEROS[written], _dynamic(section))


def _dynamic(section: Fields) -> tuple[tuple[str, Stored | None], ...]:
    """Patterns of modules that are stored in another way, or (None) not converted."""
    dynamic = section.section("dynamic")
    others: list[tuple[str, Stored | None]] = []
    for pattern in dynamic.values:
        if pattern.startswith(_LEFT_OUT):
            others.append((pattern.removeprefix(_LEFT_OUT), None))
            continue
        changed = dynamic.section(pattern)
        together = Fields({**section.values, **changed.values}, section.file, changed.prefix)
        others.append((pattern.removeprefix(_ALSO), _stored(together)))
    return tuple(others)


def _stored(section: Fields) -> Stored:
    bits = section.integer("bits")
    symmetric = section.flag("sym", True)
    if bits not in (4, 8):
        raise unknown(section, "bits", bits)
    if bits == 8 and not symmetric:
        raise unknown(section, "sym", False)
    size = group_size(section, bits)
    # Where all inputs share a scale there is but one group, whatever their order.
    return Stored(bits, size, symmetric, section.flag("desc_act") and size is not None)
