"""The config with which an imported model is measured: it has no run, and so none of its own."""

from collections.abc import Mapping
from pathlib import Path

from gaugelasso.config import Config, changed_config
from gaugelasso.errors import UserError
from gaugelasso.plugins import NamedBy
from gaugelasso.runs.checkpoint import load_spec

# Tokens of a window: attention over a context of many thousands takes much memory.
_LENGTH = 512


def task_of(causal: bool) -> str:
    """The task of tokens that a causal model, or an encoder, is for."""
    return "tokens" if causal else "masked_tokens"


def imported_config(
    folder: Path, path: str, length: int = 0, changes: Mapping[str, str] | None = None
) -> Config:
    """A task of tokens on the text at `path`, with the model and the tokenizer of the folder."""
    spec = load_spec(folder)
    most = spec.length
    if length > most:
        raise UserError(f"--length {length}: the model of {str(folder)!r} has {most} positions")
    task = {"name": task_of(spec.causal), "path": path, "length": length or min(most, _LENGTH)}
    data = {"task": task, "model": {"from": str(folder), "context": most}}
    return changed_config(data, changes or {}, NamedBy(Path.cwd()))
