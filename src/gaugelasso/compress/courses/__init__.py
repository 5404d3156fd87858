"""The course of a run: how hard to press, and at which rate, to end at what the run names.

Decides by numbers alone: knows nothing of models, files or data.
"""
