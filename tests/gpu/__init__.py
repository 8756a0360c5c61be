"""`make gpu`: what can be verified on a GPU, in ten stages; see `__main__` and docs/guides/gpu.md."""
