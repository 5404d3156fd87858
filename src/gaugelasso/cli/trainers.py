"""Creates the trainer of a command."""

from typing import Any

from gaugelasso.signals import stop_requests
from gaugelasso.training.trainer import Trainer


def build_trainer(*arguments: Any, **named: Any) -> Trainer:
    """Create the trainer. A stop signal interrupts it at once; saved files stay unchanged."""
    with (
        stop_requests() as request,
        request.interruptible("before the first step; nothing was lost"),
    ):
        return Trainer(*arguments, **named)
