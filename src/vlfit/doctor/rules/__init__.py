"""Every rule. Their order here does not matter: findings are told by their place in the log."""

from vlfit.doctor.rule import Rule
from vlfit.doctor.rules.driver import DRIVER
from vlfit.doctor.rules.files import FILES
from vlfit.doctor.rules.kernel import KERNEL
from vlfit.doctor.rules.llama import LLAMA
from vlfit.doctor.rules.memory import MEMORY
from vlfit.doctor.rules.peers import PEERS
from vlfit.doctor.rules.settings import SETTINGS
from vlfit.doctor.rules.torch import TORCH
from vlfit.doctor.rules.triton import TRITON
from vlfit.doctor.rules.wrappers import WRAPPERS

RULES: tuple[Rule, ...] = (
    *(*KERNEL, *DRIVER, *TRITON),
    *(*SETTINGS, *MEMORY, *TORCH, *PEERS),
    *(*LLAMA, *FILES, *WRAPPERS),
)
