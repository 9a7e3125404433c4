"""A running vLLM as a refit target: a worker extension and a scheduler, named in vLLM's own options."""
