"""Benchmarks: the time of a training step by its parts, and of a model at inference."""
