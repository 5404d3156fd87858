"""The method: penalises every channel while a model trains, and cuts out those that reach zero.

`Compressor` is the entry point. Everything here is generic over an axis table (`axes/`) and
knows no particular model, task or file. `reference` holds the readable forms of the equations.
"""
