"""vLLM as a backend: found, started with what was planned, watched, and stopped with all that it started."""
