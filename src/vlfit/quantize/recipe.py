"""What a conversion rounds, and to what: the choice, and how config.json tells it.

Knows: which parts of a model can be rounded, in which forms, and the ``quantization_config`` that says so to
vlfit and other programs. Does not know: files or values.
"""

from dataclasses import dataclass
from typing import Any

from vlfit.checkpoint.conversions import EIGHT_BITS, FP8_BLOCK, HEAD_TARGET, TABLE_TARGET, TOWER_TARGET
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
from vlfit.checkpoint.tensors import is_embedding, is_text_layer, linear_weights, plain_tensors
from vlfit.errors import UsageError

KEPT = "16"  # what the parts that are not rounded are said to be in
HEAD, TOWER = "lm_head", "model.visual."

Form = Fp8Format | WeightScheme


@dataclass(frozen=True, slots=True)
class Wanted:
    """What ``vlfit convert`` was told: text layers in ``weights`` (``fp8`` or ``int4``), the rest as said.

    ``head`` is ``16``, ``int8`` or ``int4``, ``embedding`` and ``vision`` are ``16`` or ``int8``.
    ``group_size`` is for int4: how many inputs share a scale.
    """

    weights: str
    group_size: int
    head: str = KEPT
    embedding: str = KEPT
    vision: str = KEPT


@dataclass(frozen=True, slots=True)
class Recipe:
    """What each part becomes; None: it keeps its bytes.

    ``text``: the linear layers of the text model; with ``keeps_text`` they are in FP8 already and stay so.
    ``head``: the output head, where it has weights of its own; a tied one is the ``embedding``. ``vision``:
    the linear layers of the tower.
    """

    text: Form
    head: WeightScheme | None = None
    embedding: WeightScheme | None = None
    vision: WeightScheme | None = None
    keeps_text: bool = False

    def meant_for(self, name: str) -> Form | None:
        """The form that the weight ``name`` should be in, whether or not it can be."""
        if is_text_layer(name):
            return self.text
        if is_embedding(name):
            return self.embedding
        if name.startswith(TOWER):
            return self.vision
        return self.head if name == f"{HEAD}.weight" else None

    def form_of(self, name: str, columns: int) -> Form | None:
        """The form that the weight ``name`` with ``columns`` inputs gets.

        FP8 has partial blocks; integers have no partial groups, so a layer that they do not divide stays.
        """
        form = self.meant_for(name)
        return form if isinstance(form, Fp8Format) or (form and form.divides(columns)) else None


def new_recipe(checkpoint: Checkpoint, wanted: Wanted) -> Recipe:
    """What ``wanted`` means for ``checkpoint``.

    Raises ``UsageError`` for a checkpoint that was rounded before, except from FP8 to less; where no layer
    fits the form; and for a head that is the embedding.
    """
    stored = checkpoint.config.quantization
    from_fp8 = stored if isinstance(stored, Fp8Format) else None
    is_plain = (wanted.head, wanted.embedding, wanted.vision) == (KEPT, KEPT, KEPT)
    if stored is not None and (from_fp8 is None or (wanted.weights == FP8 and is_plain)):
        raise UsageError(
            f"{checkpoint.name} is in {checkpoint.weights_format} already",
            "Convert the original with 16-bit weights: what was rounded once only gets worse.",
        )
    if wanted.head != KEPT and checkpoint.config.tie_word_embeddings:
        raise UsageError(
            f"{checkpoint.name} has no output head of its own: it is the embedding (tied)",
            "Leave out --head; --embedding int8 rounds both.",
        )
    four_bits = WeightScheme(4, wanted.group_size)
    block = (from_fp8.block_rows, from_fp8.block_columns) if from_fp8 else (FP8_BLOCK, FP8_BLOCK)
    recipe = Recipe(
        text=four_bits if wanted.weights == INT4 else _floats(block, is_plain=is_plain),
        head={KEPT: None, INT8: EIGHT_BITS, INT4: four_bits}[wanted.head],
        embedding=EIGHT_BITS if wanted.embedding == INT8 else None,
        vision=EIGHT_BITS if wanted.vision == INT8 else None,
        keeps_text=from_fp8 is not None and wanted.weights == FP8,
    )
    layers = [(name, columns) for name, (_, columns) in roundable(checkpoint).items() if is_text_layer(name)]
    if not any(recipe.form_of(name, columns) for name, columns in layers):
        raise UsageError(
            f"no layer of {checkpoint.name} has inputs in whole groups of {wanted.group_size}",
            "Try --group-size 32, or --weights fp8.",
        )
    return recipe


def _floats(block: tuple[int, int], *, is_plain: bool) -> Form:
    """FP8 for the text layers: the official form, which has no place for other parts in integers."""
    if is_plain:
        return Fp8Format(*block, ())
    return WeightScheme(8, block[1], kind=FLOAT_FORMAT, block_rows=block[0])


def roundable(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Weights that may be rounded, by name with rows and columns: linear layers, and the table of tokens."""
    plain = plain_tensors(checkpoint.config)
    tables = {name: (shape[0], shape[1]) for name, shape in plain.items() if is_embedding(name)}
    return {**linear_weights(plain), **tables}


def kept_layers(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """What should be rounded, and is in no whole groups, so that it keeps 16 bits."""
    return [
        name.removesuffix(".weight")
        for name, (_, columns) in roundable(checkpoint).items()
        if recipe.meant_for(name) is not None and recipe.form_of(name, columns) is None
    ]


def quantization_config(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """The ``quantization_config`` that other programs recognize the forms by."""
    may = roundable(checkpoint)
    # A tied head is named too: programs have a module for it all the same.
    kept = [] if recipe.head else [HEAD]
    for name, shape in plain_tensors(checkpoint.config).items():
        module = name.removesuffix(".weight")
        is_kept = name not in may or recipe.form_of(name, may[name][1]) is None
        if name.endswith(".weight") and len(shape) > 1 and is_kept and module not in kept:
            kept.append(module)
    if isinstance(recipe.text, Fp8Format):
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": kept,
            "quant_method": FP8_METHOD,
            "weight_block_size": [recipe.text.block_rows, recipe.text.block_columns],
        }
    groups = _groups(recipe, recipe.text)
    kinds = {group["format"] for group in groups}
    linears = linear_weights(plain_tensors(checkpoint.config))
    return {
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "format": kinds.pop() if len(kinds) == 1 else MIXED_FORMAT,
        "global_compression_ratio": None,
        "ignore": [module for module in kept if f"{module}.weight" in linears or module == HEAD],
        "kv_cache_scheme": None,
        "quant_method": COMPRESSED_METHOD,
        "quantization_status": "compressed",
    }


def _groups(recipe: Recipe, text: WeightScheme) -> list[dict[str, Any]]:
    """``config_groups``: a way of storing weights, and whose. Parts that are stored alike share one."""
    parts = {HEAD_TARGET: recipe.head, TABLE_TARGET: recipe.embedding, TOWER_TARGET: recipe.vision}
    targets: dict[WeightScheme, list[str]] = {text: ["Linear"]}
    for target, scheme in parts.items():
        if scheme is not None:
            targets.setdefault(scheme, []).append(target)
    return [_group(scheme, names) for scheme, names in targets.items()]


def _group(scheme: WeightScheme, targets: list[str]) -> dict[str, Any]:
    is_float = scheme.kind == FLOAT_FORMAT
    shared = "block" if is_float else "channel" if scheme.group_size is None else "group"
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
            "strategy": shared,
            "symmetric": scheme.symmetric,
            "type": "float" if is_float else "int",
        },
    }
