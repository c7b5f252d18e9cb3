"""Models that transformers runs, in this process. The only part of vlfit that imports transformers."""
