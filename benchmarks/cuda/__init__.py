"""Benchmarks on a GPU: `python -m benchmarks.cuda`."""
