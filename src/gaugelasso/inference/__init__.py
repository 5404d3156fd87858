"""Inference: a trained transformer in the form that serves, its cache, and generation."""

from gaugelasso.inference.accuracy import Accuracy, compare
from gaugelasso.inference.cache import Cache
from gaugelasso.inference.folding import Form
from gaugelasso.inference.generation import generate, generate_blocks
from gaugelasso.inference.graphs import Captured
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.sampling import Sampling
from gaugelasso.inference.stored import load, load_weights
from gaugelasso.inference.tuning import tuned

__all__ = [
    "Accuracy",
    "Cache",
    "Captured",
    "Form",
    "InferenceModel",
    "Sampling",
    "compare",
    "generate",
    "generate_blocks",
    "load",
    "load_weights",
    "tuned",
]
