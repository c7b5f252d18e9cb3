"""Compile the kernels of linear attention and of wide heads for a card that need not be there.

    python -m tests.kernels.compile_for 86        as JSON: shared memory, registers and stack of each

Host functions run on CPU tensors; what they would launch is compiled instead. Not in Triton's interpreter:
``TRITON_INTERPRET`` must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.launch import LaunchCache
from vlfit.kernels.recurrent.delta_rule import (
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
    gated_delta_chunks,
    gated_delta_steps,
    gated_rms_norm,
)
from vlfit.kernels.rows.row_ops import PackedQKV, gate_rows

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPTIONS = ("num_warps", "num_stages")  # of the compiler, among a launch's constants
ROOM = 4  # draft tokens that can be pending


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for: the kernel, its arguments in order, and constants and options by name."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def recorded(call: Callable[[], object]) -> list[Launch]:
    """What ``call`` launches; nothing is."""
    launches = []
    original = LaunchCache._launch

    def record(cache: LaunchCache, grid: tuple[int, ...], arguments: Any, constants: Any) -> None:
        launches.append(Launch(cache.kernel, arguments, constants))

    setattr(LaunchCache, "_launch", record)  # noqa: B010
    try:
        call()
    finally:
        setattr(LaunchCache, "_launch", original)  # noqa: B010
    return launches


def compile_launch(launch: Launch, capability: int) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes of its stack (spilled registers)."""
    names = launch.kernel.arg_names
    passed = dict(zip(names, launch.arguments, strict=False))
    constants = {name: value for name, value in launch.constants.items() if name in names}
    if "USE_PDL" in constants:
        constants["USE_PDL"] = capability >= 90
    if constants.get("FP8_KV") and "INLINE_PTX" in constants:
        constants["INLINE_PTX"], constants["NATIVE_FP8"] = True, capability >= 89
    kinds = {name: _kind(value) for name, value in passed.items()} | dict.fromkeys(constants, "constexpr")
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, value in passed.items()
        if isinstance(value, Tensor)
    }
    source = ASTSource(
        launch.kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    options = {name: launch.constants[name] for name in OPTIONS if name in launch.constants}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    return {"shared": compiled.metadata.shared, "registers": int(registers), "stack": int(stack)}


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def recurrent_calls(key_heads: int, value_heads: int) -> dict[str, Callable[[], object]]:
    """A token, drafts, and a prompt, with heads of 128 in bfloat16."""
    channels, values = (2 * key_heads + value_heads) * 128, value_heads * 128

    def run(function: Callable[..., Tensor], rows: int, room: int, **options: Any) -> None:
        half = partial(torch.empty, dtype=torch.bfloat16)
        inputs = DeltaRows(half(rows, channels), half(rows, value_heads), half(rows, value_heads))
        weights = DeltaWeights(torch.empty(channels, 4), torch.empty(value_heads), torch.empty(value_heads))
        state = DeltaState(
            torch.empty(1, channels, 3),
            torch.empty(1, value_heads, 128, 128),
            torch.empty(1, room, channels),
            torch.empty(1, room, value_heads),
            torch.empty(1, room, value_heads),
        )
        gate = OutputGate(half(rows, values), torch.empty(128), 1e-6)
        spans = torch.zeros(1, 5, dtype=torch.int32)
        function(inputs, weights, state, spans, max_length=rows, gate=gate, **options)

    heads = torch.empty(1, value_heads, 128, dtype=torch.bfloat16)
    return {
        "one token": partial(run, gated_delta_steps, 1, 0),
        "drafts": partial(run, gated_delta_steps, ROOM, ROOM, commit=False),
        "a token after drafts": partial(run, gated_delta_steps, 1, ROOM),
        "a prompt": partial(run, gated_delta_chunks, 2, 0),
        "norm": partial(gated_rms_norm, heads, heads.flatten(1), torch.empty(128), 1e-6),
    }


def attention_calls(kv_heads: int, group: int) -> dict[str, Callable[[], object]]:
    """Attention with heads of 256, of which 64 values are rotated, over caches in bfloat16 and FP8."""
    heads, half = kv_heads * group, partial(torch.empty, dtype=torch.bfloat16)

    def run(tokens: int, fp8: bool) -> None:
        tables = (half(tokens, 1, 64), half(tokens, 1, 64))
        qkv = PackedQKV(half(tokens, heads + 2 * kv_heads, 256), half(heads + kv_heads, 256), *tables, 1e-6)
        cache = torch.empty(2, 32, kv_heads, 256, dtype=torch.uint8 if fp8 else torch.bfloat16)
        scales = torch.empty(2, 32, kv_heads, dtype=torch.int16)
        metadata = BlockAttentionMetadata(
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(1, 2, dtype=torch.int32),
            torch.zeros(1, 3, dtype=torch.int32),
            16,
            num_decodes=int(tokens == 1),
            max_query_len=0 if tokens == 1 else tokens,
        )
        block_attention(qkv, cache[0], cache[1], metadata, (scales[0], scales[1]) if fp8 else None)

    return {
        "decode": partial(run, 1, False),
        "prefill": partial(run, 2, False),
        "decode, FP8": partial(run, 1, True),
        "prefill, FP8": partial(run, 2, True),
        "output gate": partial(gate_rows, half(1, heads * 256), half(1, heads, 512)[:, :, 256:]),
    }


def main() -> None:
    capability = int(sys.argv[1])
    calls = {**recurrent_calls(16, 32), **attention_calls(4, 4)}
    found = {
        f"{what}: {launch.kernel.fn.__name__}": compile_launch(launch, capability)
        for what, call in calls.items()
        for launch in recorded(call)
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
