"""Triton forms of the kernels, tested against the references. Importing them needs Triton.

Widths change at every structural event, so no kernel specialises on them. Block sizes are fixed
or powers of two: a new width needs no compilation unless its power of two is new.
"""
