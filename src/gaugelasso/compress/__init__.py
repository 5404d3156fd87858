"""The method: presses on every channel while a model trains, and cuts out those that die.

`Compressor` is the entry point. Everything here is generic over an axis table (`axes.py`): it
knows no particular model, task or file.
"""
