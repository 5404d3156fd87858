"""Training: one run from its configuration to its summary.

The trainer drives a compressor through the phases of a schedule, evaluates on held-out data,
saves, resumes, and rolls back where the loss target is lost.
"""
