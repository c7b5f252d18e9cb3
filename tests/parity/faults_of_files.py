"""Faults of files and words: weights misread, damaged files, templates, tokenizers."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.fault_table import C, Patch, fault

# Files ----------------------------------------------------------------------------------------------------


def tensor_bytes(folder: Path, name: str) -> tuple[Path, int, int]:
    """The file of a tensor, and where in it its bytes begin and end."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        if name in header:
            begin, end = header[name]["data_offsets"]
            return path, 8 + length + begin, 8 + length + end
    raise KeyError(name)


def _flip(folder: Path, name: str, byte: int, bit: int) -> None:
    path, begin, _ = tensor_bytes(folder, name)
    data = bytearray(path.read_bytes())
    data[begin + byte] ^= 1 << bit
    path.write_bytes(data)


LAYER = "model.language_model.layers.1."


@fault("one scale block off by one", C.MLP, how="edit", spec="fp8")
def fault_31(folder: Path) -> None:
    path, begin, end = tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    scales = np.frombuffer(data[begin:end], np.uint16).copy()
    scales[-1] += 1  # of the last bit of its mantissa
    data[begin:end] = scales.tobytes()
    path.write_bytes(data)


@fault("scale blocks in another order", C.MLP, how="edit", spec="fp8")
def fault_32(folder: Path) -> None:
    path, begin, end = tensor_bytes(folder, f"{LAYER}mlp.gate_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    scales = np.frombuffer(data[begin:end], np.uint16).copy()
    data[begin:end] = scales[::-1].tobytes()
    path.write_bytes(data)


@fault("one bit of a weight misread", C.ATTENTION, how="edit")
def fault_33(folder: Path) -> None:
    _flip(folder, f"{LAYER}self_attn.o_proj.weight", 4 * 100 + 2, 6)


@fault("one bit of a shard", C.FILE, how="edit", both=True, level="full", spec="untied_sharded")
def fault_34(folder: Path) -> None:
    import hashlib

    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("*.safetensors"))
    ]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    _flip(folder, f"{LAYER}mlp.down_proj.weight", 400, 2)


@fault("the highest bit of an exponent in a file", C.FILE, how="edit", both=True, level="quick")
def exponent(folder: Path) -> None:
    path, begin, end = tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight")
    data = bytearray(path.read_bytes())
    high = next(at for at in range(begin + 3, end, 4) if data[at] & 0x7F == 0x3D)  # 0.03 to 0.125
    data[high] ^= 0x40
    path.write_bytes(data)


@fault("a weight that is not a number", C.FILE, how="edit", both=True, level="quick")
def not_a_number(folder: Path) -> None:
    path, begin, _ = tensor_bytes(folder, f"{LAYER}self_attn.o_proj.weight")
    data = bytearray(path.read_bytes())
    data[begin : begin + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)


@fault("a download that left a matrix of zeros", C.FILE, how="edit", both=True, level="quick")
def zeros(folder: Path) -> None:
    path, begin, end = tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight")
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


@fault("a scale that is not a number", C.FILE, how="edit", both=True, spec="fp8")
def fault_35(folder: Path) -> None:
    path, begin, _ = tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    data[begin : begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)


@fault("a control token as end of turn left out", C.STOP, how="edit", both=True)
def fault_36(folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text("utf-8"))
    values["eos_token_id"] = values["eos_token_id"][1]
    path.write_text(json.dumps(values), encoding="utf-8")


@fault("an end token that is a word", C.STOP, how="edit", both=True)
def fault_37(folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text("utf-8"))
    values["eos_token_id"] = [300, *values["eos_token_id"]]
    path.write_text(json.dumps(values), encoding="utf-8")


# Words ----------------------------------------------------------------------------------------------------


def _template_edit(old: str, new: str) -> Callable[[Patch], None]:
    def change(patch: Patch) -> None:
        from vlfit.checkpoint.processor_files import read_chat_template as inner

        def read(folder: Path) -> str:
            text = inner(folder)
            assert old in text
            return text.replace(old, new)

        patch.setattr("vlfit.prompt.builder.read_chat_template", read)

    return change


fault("no line break after the role", C.TEMPLATE, how="patch")(
    _template_edit("'<|im_start|>assistant\\n'", "'<|im_start|>assistant'")
)
fault("no header of the answer", C.TEMPLATE, how="patch")(_template_edit("'<|im_start|>assistant\\n'", "''"))


@fault("control tokens as text", C.TOKENIZER, how="patch")
def fault_38(patch: Patch) -> None:
    from vlfit.prompt.control_tokens import ControlTokens, encode_plain

    def encode(self: Any, text: str) -> list[int]:
        # Of pictures alone they stay, as the prompt could not be built without.
        ids = list(encode_plain(self._tokenizer, "<|im_start|>"))
        out: list[int] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            out += ids if self._tokenizer.id_to_token(token) == "<|im_start|>" else [token]
        return out

    patch.setattr(ControlTokens, "_encode", encode)


@fault("a user's text forges control tokens", C.TOKENIZER, how="patch")
def fault_39(patch: Patch) -> None:
    from vlfit.prompt.control_tokens import ControlTokens

    patch.setattr(ControlTokens, "_encode_plain", ControlTokens._encode)


# More words ------------------------------------------------------------------------------------------------

fault("no line break after a turn", C.TEMPLATE, how="patch")(
    _template_edit("'<|im_end|>\\n'", "'<|im_end|>'")
)
fault("a space after the role", C.TEMPLATE, how="patch")(
    _template_edit("'<|im_start|>' + message.role + '\\n'", "'<|im_start|>' + message.role + ' \\n'")
)
fault("no mark before a picture", C.TEMPLATE, how="patch")(
    _template_edit("<|vision_start|><|image_pad|>", "<|image_pad|>")
)


@fault("text is put into lower case", C.TOKENIZER, C.TEMPLATE, how="patch", spec="qwen3")
def lower(patch: Patch) -> None:
    from vlfit.prompt.control_tokens import ControlTokens

    inner = ControlTokens._encode
    patch.setattr(ControlTokens, "_encode", lambda self, text: inner(self, text.lower()))


@fault(
    "a shard is cut short and filled with zeros",
    C.FILE,
    how="edit",
    both=True,
    level="full",
    spec="untied_sharded",
)
def cut_short(folder: Path) -> None:
    import hashlib

    files = sorted(folder.glob("*.safetensors"))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    data = bytearray(files[-1].read_bytes())
    data[-4096:] = bytes(4096)
    files[-1].write_bytes(data)


@fault("weights of two layers under each other's names", C.ATTENTION, how="edit", spec="qwen3")
def other_names(folder: Path) -> None:
    names = [f"model.layers.{index}.self_attn.v_proj.weight" for index in (0, 1)]
    found = [tensor_bytes(folder, name) for name in names]
    parts = [path.read_bytes()[begin:end] for path, begin, end in found]
    for (path, begin, end), part in zip(found, reversed(parts), strict=True):
        data = bytearray(path.read_bytes())
        data[begin:end] = part
        path.write_bytes(data)
