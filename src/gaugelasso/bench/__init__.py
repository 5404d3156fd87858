"""Benchmarks: the time of a training step by parts, and of a model at inference."""
