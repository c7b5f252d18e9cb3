"""All rules, in any order: findings are ranked by their position in the log."""

from vlfit.doctor.rule import Rule
from vlfit.doctor.rules.driver import DRIVER, TRITON
from vlfit.doctor.rules.gguf import GGUF
from vlfit.doctor.rules.llama_cpp import LLAMA_CPP
from vlfit.doctor.rules.multi_gpu import MULTI_GPU
from vlfit.doctor.rules.system import FILES, KERNEL, WRAPPERS
from vlfit.doctor.rules.torch_memory import TORCH
from vlfit.doctor.rules.verify_findings import VERIFY
from vlfit.doctor.rules.vllm_memory import VLLM_MEMORY
from vlfit.doctor.rules.vllm_settings import VLLM_SETTINGS

RULES: tuple[Rule, ...] = (
    *(*KERNEL, *DRIVER, *TRITON),
    *(*VLLM_SETTINGS, *VLLM_MEMORY, *TORCH, *MULTI_GPU),
    *(*LLAMA_CPP, *GGUF, *FILES, *VERIFY, *WRAPPERS),
)
