"""Tasks: what a model learns. One protocol, one file a task, one row in TASKS."""

from collections.abc import Mapping
from typing import Any

from gaugelasso.tasks.charlm import CharLM
from gaugelasso.tasks.ff31 import FF31
from gaugelasso.tasks.mae import MaskedAutoencoder
from gaugelasso.tasks.masked_tokens import MaskedTokens
from gaugelasso.tasks.noise import Noise
from gaugelasso.tasks.protocol import (
    EVALUATION,
    SELECTION,
    TEST,
    TRAINING,
    Draw,
    Illustrated,
    Predict,
    SequenceTask,
    Task,
    WithBestMetric,
    WithData,
    WithEnd,
    WithFigures,
    WithFiles,
)
from gaugelasso.tasks.retrieval import Retrieval
from gaugelasso.tasks.token_text import TokenText
from gaugelasso.tasks.tokens import Tokens

TASKS: Mapping[str, Any] = {
    "retrieval": Retrieval,
    "ff31": FF31,
    "charlm": CharLM,
    "mae": MaskedAutoencoder,
    "noise": Noise,
    "tokens": Tokens,
    "masked_tokens": MaskedTokens,
}
# Those over the vocabulary of a tokenizer, which a model brings along.
TOKEN_TASKS = tuple(name for name, task in TASKS.items() if issubclass(task, TokenText))

__all__ = [
    "EVALUATION",
    "FF31",
    "SELECTION",
    "TASKS",
    "TEST",
    "TOKEN_TASKS",
    "TRAINING",
    "CharLM",
    "Draw",
    "Illustrated",
    "MaskedAutoencoder",
    "MaskedTokens",
    "Noise",
    "Predict",
    "Retrieval",
    "SequenceTask",
    "Task",
    "TokenText",
    "Tokens",
    "WithBestMetric",
    "WithData",
    "WithEnd",
    "WithFigures",
    "WithFiles",
]
