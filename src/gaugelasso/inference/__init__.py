"""Inference: a trained transformer in the form that serves, its cache, and generation."""

from gaugelasso.inference.cache import Cache
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.operators import Form

__all__ = ["Cache", "Form", "InferenceModel"]
