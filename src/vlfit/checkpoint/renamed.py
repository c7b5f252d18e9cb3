"""Config and headers in one language: what AWQ and GPTQ call otherwise gets the names of compressed-tensors.

Knows: how a ``CompressedFormat`` says the same as a ``ByInputs``. Does not know: which names there are
(``by_inputs.py`` does).
"""

from dataclasses import replace

from vlfit.checkpoint.by_inputs import QWEIGHT, ByInputs, Stored
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import CompressedFormat, WeightScheme
from vlfit.checkpoint.tensors import linear_weights, plain_tensors
from vlfit.errors import UnknownWeightsFormat


def renamed(config: ModelConfig, tensors: dict[str, TensorInfo]) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """``config`` and ``tensors`` of any checkpoint, in words that ``check_tensors`` and the engine know.

    Raises what ``ByInputs.read_in`` raises, and ``UnknownWeightsFormat`` where config.json has no word of
    them.
    """
    if not isinstance(config.quantization, ByInputs):
        if config.quantization is None and any(name.endswith(QWEIGHT) for name in tensors):
            raise UnknownWeightsFormat(
                "the weights are stored as AWQ and GPTQ do, but config.json has no quantization_config",
                "Older programs wrote quantize_config.json or quant_config.json: put what it holds into "
                'config.json, as {"quantization_config": {"quant_method": "gptq" or "awq", ...}}.',
            )
        return config, tensors
    plain = plain_tensors(config)
    matrices = {name.removesuffix(".weight"): shape for name, shape in linear_weights(plain).items()}
    converted, named = config.quantization.read_in(matrices, tensors)
    for bias in (f"{module}.bias" for module in converted):
        # Older programs wrote one of zeros for each layer; vLLM passes over them without a look.
        if bias in named and bias not in plain and _is_zeros(named[bias]):
            del named[bias]
    kept = tuple(module for module in matrices if module not in converted)
    return replace(config, quantization=CompressedFormat(_schemes(converted), kept)), named


def _is_zeros(info: TensorInfo) -> bool:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return not any(file.read(info.bytes))


def _schemes(converted: dict[str, Stored]) -> tuple[WeightScheme, ...]:
    """One for each way that modules are stored; the commonest is that of all who are not named."""
    modules: dict[Stored, list[str]] = {}
    for module, stored in converted.items():
        modules.setdefault(stored, []).append(module)
    most = max(modules, key=lambda stored: len(modules[stored]), default=None)
    return tuple(
        WeightScheme(
            stored.bits,
            stored.group_size,
            stored.symmetric,
            targets=("Linear",) if stored is most else tuple(named),
            ordered=stored.ordered,
        )
        for stored, named in modules.items()
    )
