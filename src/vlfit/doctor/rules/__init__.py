"""Every rule. Their order here does not matter: findings are told by their place in the log."""

from vlfit.doctor.rule import Rule
from vlfit.doctor.rules.driver import DRIVER, TRITON
from vlfit.doctor.rules.llama_cpp import LLAMA
from vlfit.doctor.rules.multi_gpu import PEERS
from vlfit.doctor.rules.system import FILES, KERNEL, WRAPPERS
from vlfit.doctor.rules.torch_memory import TORCH
from vlfit.doctor.rules.vllm_memory import MEMORY
from vlfit.doctor.rules.vllm_settings import SETTINGS

RULES: tuple[Rule, ...] = (
    *(*KERNEL, *DRIVER, *TRITON),
    *(*SETTINGS, *MEMORY, *TORCH, *PEERS),
    *(*LLAMA, *FILES, *WRAPPERS),
)
