"""Cards that people plan with: memory as the driver reports it, bandwidth, compute capability, PCIe link.

Knows numbers and where they are from. Does not know how a name is looked up (``cards.py``).

Sources. Total: the MiB that ``nvidia-smi`` prints for that card (NVML's total), as owners have published it
for each card here with drivers of 2023 to 2026; from Ada on, and with ECC, it is a little less than the size
on the box. Bandwidth: bus width by data rate of the vendor's data sheet, in 10^9 bytes per second; a laptop's
can be lower, where its maker clocks the memory down. Compute capability: NVIDIA's list of CUDA GPUs. PCIe:
the card's own connector; a slot can offer less.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One model of card. ``total`` in MiB, ``bandwidth`` in 10^9 bytes per second.

    ``name`` is the driver's without "NVIDIA", followed by the size where cards of one name come with several.
    """

    name: str
    total: int
    bandwidth: float
    compute_capability: tuple[int, int]
    pcie_generation: int
    pcie_lanes: int


CARDS = (
    # Blackwell, desktop: GDDR7 at 28 Gbit/s (5080: 30), the 5050 GDDR6 at 20.
    Card("GeForce RTX 5090", 32607, 1792, (12, 0), 5, 16),
    Card("GeForce RTX 5080", 16303, 960, (12, 0), 5, 16),
    Card("GeForce RTX 5070 Ti", 16303, 896, (12, 0), 5, 16),
    Card("GeForce RTX 5070", 12227, 672, (12, 0), 5, 16),
    Card("GeForce RTX 5060 Ti 16GB", 16311, 448, (12, 0), 5, 8),
    Card("GeForce RTX 5060 Ti 8GB", 8151, 448, (12, 0), 5, 8),
    Card("GeForce RTX 5060", 8151, 448, (12, 0), 5, 8),
    Card("GeForce RTX 5050", 8151, 320, (12, 0), 5, 8),
    # Blackwell, laptop.
    Card("GeForce RTX 5090 Laptop GPU", 24463, 896, (12, 0), 5, 16),
    Card("GeForce RTX 5080 Laptop GPU", 16303, 896, (12, 0), 5, 16),
    Card("GeForce RTX 5070 Ti Laptop GPU", 12227, 672, (12, 0), 5, 16),
    Card("GeForce RTX 5070 Laptop GPU", 8151, 384, (12, 0), 5, 8),
    Card("GeForce RTX 5060 Laptop GPU", 8151, 384, (12, 0), 5, 8),
    Card("GeForce RTX 5050 Laptop GPU", 8151, 384, (12, 0), 5, 8),
    # Ada Lovelace, desktop.
    Card("GeForce RTX 4090", 24564, 1008, (8, 9), 4, 16),
    Card("GeForce RTX 4080 SUPER", 16376, 736, (8, 9), 4, 16),
    Card("GeForce RTX 4080", 16376, 716.8, (8, 9), 4, 16),
    Card("GeForce RTX 4070 Ti SUPER", 16376, 672, (8, 9), 4, 16),
    Card("GeForce RTX 4070 Ti", 12282, 504, (8, 9), 4, 16),
    Card("GeForce RTX 4070 SUPER", 12282, 504, (8, 9), 4, 16),
    Card("GeForce RTX 4070", 12282, 504, (8, 9), 4, 16),
    Card("GeForce RTX 4060 Ti 16GB", 16380, 288, (8, 9), 4, 8),
    Card("GeForce RTX 4060 Ti 8GB", 8188, 288, (8, 9), 4, 8),
    Card("GeForce RTX 4060", 8188, 272, (8, 9), 4, 8),
    # Ada Lovelace, laptop.
    Card("GeForce RTX 4090 Laptop GPU", 16376, 576, (8, 9), 4, 16),
    Card("GeForce RTX 4080 Laptop GPU", 12282, 432, (8, 9), 4, 16),
    Card("GeForce RTX 4070 Laptop GPU", 8188, 256, (8, 9), 4, 8),
    Card("GeForce RTX 4060 Laptop GPU", 8188, 256, (8, 9), 4, 8),
    Card("GeForce RTX 4050 Laptop GPU", 6141, 192, (8, 9), 4, 8),
    # Ampere, desktop.
    Card("GeForce RTX 3090 Ti", 24564, 1008, (8, 6), 4, 16),
    Card("GeForce RTX 3090", 24576, 936.2, (8, 6), 4, 16),
    Card("GeForce RTX 3080 Ti", 12288, 912.4, (8, 6), 4, 16),
    Card("GeForce RTX 3080 12GB", 12288, 912.4, (8, 6), 4, 16),
    Card("GeForce RTX 3080 10GB", 10240, 760.3, (8, 6), 4, 16),
    Card("GeForce RTX 3070 Ti", 8192, 608.3, (8, 6), 4, 16),
    Card("GeForce RTX 3070", 8192, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3060 Ti", 8192, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3060 12GB", 12288, 360, (8, 6), 4, 16),
    Card("GeForce RTX 3060 8GB", 8192, 240, (8, 6), 4, 16),
    Card("GeForce RTX 3050 8GB", 8192, 224, (8, 6), 4, 8),
    Card("GeForce RTX 3050 6GB", 6144, 168, (8, 6), 4, 8),
    # Ampere, laptop.
    Card("GeForce RTX 3080 Ti Laptop GPU", 16384, 512, (8, 6), 4, 16),
    Card("GeForce RTX 3080 Laptop GPU 16GB", 16384, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3080 Laptop GPU 8GB", 8192, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3070 Ti Laptop GPU", 8192, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3070 Laptop GPU", 8192, 448, (8, 6), 4, 16),
    Card("GeForce RTX 3060 Laptop GPU", 6144, 336, (8, 6), 4, 16),
    Card("GeForce RTX 3050 Ti Laptop GPU", 4096, 192, (8, 6), 4, 8),
    Card("GeForce RTX 3050 6GB Laptop GPU", 6144, 144, (8, 6), 4, 8),
    Card("GeForce RTX 3050 Laptop GPU 4GB", 4096, 192, (8, 6), 4, 8),
    # Turing.
    Card("GeForce RTX 2080 Ti", 11264, 616, (7, 5), 3, 16),
    Card("GeForce RTX 2080 SUPER", 8192, 496, (7, 5), 3, 16),
    Card("GeForce RTX 2080", 8192, 448, (7, 5), 3, 16),
    Card("GeForce RTX 2070 SUPER", 8192, 448, (7, 5), 3, 16),
    Card("GeForce RTX 2070", 8192, 448, (7, 5), 3, 16),
    Card("GeForce RTX 2060 SUPER", 8192, 448, (7, 5), 3, 16),
    Card("GeForce RTX 2060 12GB", 12288, 336, (7, 5), 3, 16),
    Card("GeForce RTX 2060 6GB", 6144, 336, (7, 5), 3, 16),
    Card("GeForce GTX 1660 Ti", 6144, 288, (7, 5), 3, 16),
    Card("GeForce GTX 1660 SUPER", 6144, 336, (7, 5), 3, 16),
    Card("GeForce GTX 1660", 6144, 192, (7, 5), 3, 16),
    Card("GeForce GTX 1650 SUPER", 4096, 192, (7, 5), 3, 16),
    Card("GeForce GTX 1650", 4096, 128, (7, 5), 3, 16),
    # Workstation.
    Card("RTX PRO 6000 Blackwell Workstation Edition", 97887, 1792, (12, 0), 5, 16),
    Card("RTX PRO 6000 Blackwell Server Edition", 97887, 1597, (12, 0), 5, 16),
    Card("RTX 6000 Ada Generation", 49140, 960, (8, 9), 4, 16),
    Card("RTX 5000 Ada Generation", 32760, 576, (8, 9), 4, 16),
    Card("RTX 4000 Ada Generation", 20475, 360, (8, 9), 4, 16),
    Card("RTX 2000 Ada Generation", 16380, 224, (8, 9), 4, 8),
    Card("RTX A6000", 49140, 768, (8, 6), 4, 16),
    Card("RTX A5000", 24564, 768, (8, 6), 4, 16),
    Card("RTX A4500", 20470, 640, (8, 6), 4, 16),
    Card("RTX A4000", 16376, 448, (8, 6), 4, 16),
    Card("RTX A2000 12GB", 12282, 288, (8, 6), 4, 16),
    Card("RTX A2000 6GB", 6138, 288, (8, 6), 4, 16),
    # Data centre. Those with GDDR6 and ECC on show about 6 % less than on the box.
    Card("H200", 143771, 4814, (9, 0), 5, 16),
    Card("H200 NVL", 143771, 4814, (9, 0), 5, 16),
    Card("H100 80GB HBM3", 81559, 3352, (9, 0), 5, 16),
    Card("H100 PCIe", 81559, 2039, (9, 0), 5, 16),
    Card("H100 NVL", 95830, 3938, (9, 0), 5, 16),
    Card("A100-SXM4-80GB", 81920, 2039, (8, 0), 4, 16),
    Card("A100 80GB PCIe", 81920, 1935, (8, 0), 4, 16),
    Card("A100-SXM4-40GB", 40960, 1555, (8, 0), 4, 16),
    Card("A100-PCIE-40GB", 40960, 1555, (8, 0), 4, 16),
    Card("A40", 46068, 695.8, (8, 6), 4, 16),
    Card("A30", 24576, 933, (8, 0), 4, 16),
    Card("A10G", 23028, 600, (8, 6), 4, 16),
    Card("A10", 23028, 600, (8, 6), 4, 16),
    Card("L40S", 46068, 864, (8, 9), 4, 16),
    Card("L40", 46068, 864, (8, 9), 4, 16),
    Card("L4", 23034, 300, (8, 9), 4, 16),
    Card("Tesla T4", 15360, 320, (7, 5), 3, 16),
)
