"""Kernels as compiled on a GPU; elsewhere by Triton's interpreter.

Triton reads the variable that selects the interpreter when it is imported.
"""

import os

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
