"""``quantization_config`` of AWQ checkpoints, as AutoAWQ and GPTQModel write them (quant_method ``awq``).

Knows: which fields there are, under their older names too, and which layouts vlfit reads: ``gemm`` alone, the
one that AutoAWQ's ``WQLinear_GEMM`` defines. Does not know: tensors (``by_inputs.py`` does).
"""

from vlfit.checkpoint.by_inputs import ByInputs, Stored
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.headers import Layout
from vlfit.errors import UnknownWeightsFormat

AWQ_METHOD = "awq"
WHAT_IS_READ = (
    "vlfit reads AWQ of version gemm in 4 bits, GPTQ in 4 bits or symmetric 8 bits, and AutoRound in the "
    "layout of either. vlfit convert makes int4 from the original checkpoint."
)


def read_awq(section: Fields) -> ByInputs:
    """Raises ``UnknownWeightsFormat`` for what vlfit does not run, ``CheckpointError`` for wrong fields."""
    name = named(section, "version", "checkpoint_format", "format")
    version = section.text(name, "gemm")
    if version.lower() != "gemm":
        raise unknown(section, name, version)
    if section.values.get("backend") == "llm-awq":  # transformers' way to say the version of that name
        raise unknown(section, "backend", "llm-awq")
    bits = section.integer(named(section, "bits", "w_bit"))
    if bits != 4:
        raise unknown(section, "bits", bits)
    size = group_size(section, bits)
    return ByInputs(Stored(bits, size, symmetric=False), Layout.AWQ_CODES, Layout.AWQ_ZEROS)


def group_size(section: Fields, bits: int) -> int | None:
    """How many inputs share a scale: None where all of a row do, which is written -1."""
    name = named(section, "group_size", "q_group_size")
    size = section.integer(name, least=-1)
    if size == -1:
        return None
    if size == 0 or size % (32 // bits):
        raise unknown(section, name, size)
    return size


def named(section: Fields, name: str, *older: str) -> str:
    """The name of a field that ``section`` has under one of these; the first if it has none of them."""
    return next((each for each in (name, *older) if section.has(each)), name)


def unknown(section: Fields, name: str, value: object) -> UnknownWeightsFormat:
    """The error for a field whose value vlfit does not run."""
    return UnknownWeightsFormat(f"config.json: {section.prefix}{name} is {value!r}", WHAT_IS_READ)
