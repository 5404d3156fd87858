"""What a measurement leaves as it was: modes of modules, random numbers, gradients."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module has its own mode again afterwards: a part of the model may be in eval mode."""
    model_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(model_training)  # a class may do more there than set the mode
        for module, training in modes:
            module.training = training


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Later random numbers are those that would come without what is drawn inside."""
    python, arrays = random.getstate(), numpy.random.get_state()
    # Without a list torch takes all GPUs, and warns where there are several.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


@contextmanager
def same_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients that are removed inside are there again: a step has not used them yet."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
