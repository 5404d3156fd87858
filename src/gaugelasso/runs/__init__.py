"""The run folder: configuration, logs, checkpoints and their manifests.

Reports read nothing else. Uses `models` to rebuild a network from a checkpoint, and not `compress`.
"""
