"""What a conversion quantizes and to which format, and the ``quantization_config`` that describes it."""

from dataclasses import dataclass
from typing import Any

from vlfit.checkpoint.conversions import EMBEDDING_TARGET, FP8_BLOCK, HEAD_TARGET, INT8_PER_ROW
from vlfit.checkpoint.quantization import (
    COMPRESSED_METHOD,
    FLOAT_FORMAT,
    FP8,
    FP8_METHOD,
    INT4,
    INT8,
    MIXED_FORMAT,
    Fp8Format,
    WeightScheme,
)
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import (
    is_embedding,
    is_text_layer,
    is_vision,
    linear_weight_shapes,
    plain_tensor_shapes,
    quantizable_weight_shapes,
)
from vlfit.errors import UsageError
from vlfit.models.registry import spec_of

UNCHANGED = "16"  # the option for parts that are not quantized
HEAD = "lm_head"

TargetFormat = Fp8Format | WeightScheme


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of ``vlfit convert``: format of the text layers (``fp8`` or ``int4``) and of the other parts.

    ``head`` is ``16``, ``int8`` or ``int4``, ``embedding`` and ``vision`` are ``16`` or ``int8``.
    ``group_size``: inputs that share a scale in int4.
    """

    weights: str
    group_size: int
    head: str = UNCHANGED
    embedding: str = UNCHANGED
    vision: str = UNCHANGED


@dataclass(frozen=True, slots=True)
class Recipe:
    """Target format of each part of a checkpoint; None: the part is copied.

    ``text``: of the linear layers of the text model. ``keeps_fp8_text``: the source has these in FP8 already,
    and they are copied. ``head``: of the output head, if it is not tied to the embedding. ``vision``: of the
    linear layers of the vision tower. ``unquantized``: endings of names of text matrices that are copied.
    """

    text: TargetFormat
    head: WeightScheme | None = None
    embedding: WeightScheme | None = None
    vision: WeightScheme | None = None
    keeps_fp8_text: bool = False
    unquantized: tuple[str, ...] = ()

    def intended_format(self, name: str) -> TargetFormat | None:
        """The format of the part that the weight ``name`` belongs to; None: copied.

        Ignores its shape: see ``target_format_for``.
        """
        if is_text_layer(name):
            return None if name.endswith(self.unquantized) else self.text
        if is_embedding(name):
            return self.embedding
        if is_vision(name):
            return self.vision
        return self.head if name == f"{HEAD}.weight" else None

    def target_format_for(self, name: str, columns: int) -> TargetFormat | None:
        """The format in which the weight ``name`` with ``columns`` inputs is written; None: copied.

        A layer is copied if the format is int4 or int8 and its inputs are not a whole number of groups; FP8
        permits partial blocks.
        """
        target_format = self.intended_format(name)
        return (
            target_format
            if isinstance(target_format, Fp8Format)
            or (target_format and target_format.can_store_columns(columns))
            else None
        )


def new_recipe(checkpoint: Checkpoint, options: ConversionOptions) -> Recipe:
    """The recipe for ``options`` and ``checkpoint``.

    Raises ``UsageError`` for GGUF, for a checkpoint that is quantized already (but FP8 may become int4, or
    have more parts quantized), if groups divide the inputs of no layer, and for a head format if the head is
    tied to the embedding.
    """
    source_format = checkpoint.config.quantization
    fp8_source = source_format if isinstance(source_format, Fp8Format) else None
    is_plain = (options.head, options.embedding, options.vision) == (UNCHANGED, UNCHANGED, UNCHANGED)
    if checkpoint.gguf is not None:
        raise UsageError(
            f"{checkpoint.name} is a GGUF model ({checkpoint.gguf.type}), which vlfit runs and does not "
            f"convert to {options.weights}",
            "Convert the original checkpoint."
            if source_format is not None
            else "Convert the original checkpoint, or write other GGUF types with --to gguf.",
        )
    if source_format is not None and (fp8_source is None or (options.weights == FP8 and is_plain)):
        raise UsageError(
            f"{checkpoint.name} is already in {checkpoint.weights_format}",
            "Convert the original 16-bit checkpoint: quantizing twice loses accuracy.",
        )
    if options.head != UNCHANGED and checkpoint.config.tie_word_embeddings:
        raise UsageError(
            f"{checkpoint.name} has no separate output head: it is tied to the embedding",
            "Leave out --head; --embedding int8 quantizes both.",
        )
    int4 = WeightScheme(4, options.group_size)
    block = (fp8_source.block_rows, fp8_source.block_columns) if fp8_source else (FP8_BLOCK, FP8_BLOCK)
    recipe = Recipe(
        text=int4 if options.weights == INT4 else _fp8_format(block, is_plain=is_plain),
        head={UNCHANGED: None, INT8: INT8_PER_ROW, INT4: int4}[options.head],
        embedding=INT8_PER_ROW if options.embedding == INT8 else None,
        vision=INT8_PER_ROW if options.vision == INT8 else None,
        keeps_fp8_text=fp8_source is not None and options.weights == FP8,
        unquantized=spec_of(checkpoint.config.model_type).unquantized,
    )
    layers = [
        (name, columns)
        for name, (_, columns) in quantizable_weight_shapes(plain_tensor_shapes(checkpoint.config)).items()
        if is_text_layer(name)
    ]
    if not any(recipe.target_format_for(name, columns) for name, columns in layers):
        raise UsageError(
            f"no layer of {checkpoint.name} has inputs divisible into groups of {options.group_size}",
            "Try --group-size 32, or --weights fp8.",
        )
    return recipe


def _fp8_format(block: tuple[int, int], *, is_plain: bool) -> TargetFormat:
    """FP8 for the text layers: the official format, unless other parts are quantized, which it cannot
    express.
    """
    if is_plain:
        return Fp8Format(*block, ())
    return WeightScheme(8, block[1], kind=FLOAT_FORMAT, block_rows=block[0])


def indivisible_layers(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """Names of the layers that ``recipe`` would quantize but copies, as groups do not divide their inputs."""
    return [
        name.removesuffix(".weight")
        for name, (_, columns) in quantizable_weight_shapes(plain_tensor_shapes(checkpoint.config)).items()
        if recipe.intended_format(name) is not None and recipe.target_format_for(name, columns) is None
    ]


def quantization_config(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """The ``quantization_config`` to write to config.json: official FP8's, or compressed-tensors'."""
    quantizable = quantizable_weight_shapes(plain_tensor_shapes(checkpoint.config))
    # A tied head is listed too: programs have a module for it anyway.
    unquantized = [] if recipe.head else [HEAD]
    for name, shape in plain_tensor_shapes(checkpoint.config).items():
        module = name.removesuffix(".weight")
        is_unquantized = (
            name not in quantizable or recipe.target_format_for(name, quantizable[name][1]) is None
        )
        if name.endswith(".weight") and len(shape) > 1 and is_unquantized and module not in unquantized:
            unquantized.append(module)
    if isinstance(recipe.text, Fp8Format):
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": unquantized,
            "quant_method": FP8_METHOD,
            "weight_block_size": [recipe.text.block_rows, recipe.text.block_columns],
        }
    groups = _config_groups(checkpoint, recipe, recipe.text)
    kinds = {group["format"] for group in groups}
    linears = linear_weight_shapes(plain_tensor_shapes(checkpoint.config))
    return {
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "format": kinds.pop() if len(kinds) == 1 else MIXED_FORMAT,
        "global_compression_ratio": None,
        "ignore": [module for module in unquantized if f"{module}.weight" in linears or module == HEAD],
        "kv_cache_scheme": None,
        "quant_method": COMPRESSED_METHOD,
        "quantization_status": "compressed",
    }


def _config_groups(checkpoint: Checkpoint, recipe: Recipe, text: WeightScheme) -> list[dict[str, Any]]:
    """``config_groups``: formats and the modules they apply to. Parts with the same format share one."""
    parts = {HEAD_TARGET: recipe.head, EMBEDDING_TARGET: recipe.embedding}
    vision = spec_of(checkpoint.config.model_type).vision_modules
    if vision is not None:
        parts[vision.quantized] = recipe.vision
    targets: dict[WeightScheme, list[str]] = {text: ["Linear"]}
    for target, scheme in parts.items():
        if scheme is not None:
            targets.setdefault(scheme, []).append(target)
    return [_config_group(scheme, names) for scheme, names in targets.items()]


def _config_group(scheme: WeightScheme, targets: list[str]) -> dict[str, Any]:
    is_float = scheme.kind == FLOAT_FORMAT
    strategy = "block" if is_float else "channel" if scheme.group_size is None else "group"
    return {
        "format": scheme.kind,
        "input_activations": None,
        "output_activations": None,
        "targets": targets,
        "weights": {
            "actorder": None,
            "block_structure": [scheme.block_rows, scheme.group_size] if is_float else None,
            "dynamic": False,
            "group_size": None if is_float else scheme.group_size,
            "num_bits": scheme.bits,
            "observer": "minmax" if is_float else "mse",
            "observer_kwargs": {},
            "strategy": strategy,
            "symmetric": scheme.symmetric,
            "type": "float" if is_float else "int",
        },
    }
