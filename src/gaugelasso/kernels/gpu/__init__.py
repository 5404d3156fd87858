"""Triton forms of the kernels. Imported only where Triton is; tested against the plain forms.

Widths change at every structural event, so no kernel specialises on them: block sizes
are fixed or powers of two, and a new width never compiles anew within its power.
"""
