"""The run folder: configuration, logs, checkpoints and their manifests.

Reports read nothing else. Knows models (to rebuild one from a checkpoint), but not the method.
"""
