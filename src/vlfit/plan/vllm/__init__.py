"""vLLM as a backend of the plan: what its process holds, and the command that keeps it there."""
