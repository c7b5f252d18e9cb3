"""How fast this device's memory is: a large copy, counted as one read and one write. The limit of decoding.

Prints GB/s (1e9 bytes). A process of its own, so that its buffers are in no engine's account.
"""

import statistics
import sys
import time

from benchmarks.measure import MIB


def main() -> None:
    import torch

    device, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    size = (256 if device == "cpu" else 2048) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(2 * size / statistics.median(seconds[2:]) / 1e9)


if __name__ == "__main__":
    main()
