"""vLLM as a backend of the plan: its memory, and the ``vllm serve`` command that stays within it."""
