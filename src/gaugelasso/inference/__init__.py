"""Inference: a trained transformer in the form that serves, its cache, and generation."""

from gaugelasso.inference.cache import Cache
from gaugelasso.inference.generation import generate, generate_blocks
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Form
from gaugelasso.inference.sampling import Sampling

__all__ = ["Cache", "Form", "InferenceModel", "Sampling", "generate", "generate_blocks"]
