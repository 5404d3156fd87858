"""Baselines: what a run's structure is worth against plain training of uniform models."""
