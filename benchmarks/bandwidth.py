"""How fast this device's memory is, as ``vlfit bench`` measures it. The limit of decoding.

Prints GB/s (1e9 bytes). A process of its own, so that its buffers are in no engine's account.
"""

import sys


def main() -> None:
    import torch

    from vlfit.tuning.bandwidth import memory_bandwidth

    device, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    print(memory_bandwidth(torch.device(device)) / 1e9)


if __name__ == "__main__":
    main()
