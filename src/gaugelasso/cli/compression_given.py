"""MODEL of `compress`: a source to import, a folder that import wrote, or a run to go on from."""

from dataclasses import dataclass
from pathlib import Path

from gaugelasso import importing
from gaugelasso.errors import UserError
from gaugelasso.importing.folder import missing_tokenizer
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.reading import exists, is_folder, is_imported, read_json


@dataclass(frozen=True)
class Given:
    """What is known of MODEL before it is imported."""

    causal: bool
    parameters: int


def resolved(model: Path) -> Path:
    """MODEL, or the run in a folder that `compress` wrote; without a run, the base in it."""
    if is_folder(model) and not exists(model / "config.json") and exists(model / "base"):
        for name in ("run", "base"):
            if exists(model / name / "config.json"):
                return model / name
    return model


def read_given(model: Path) -> Given:
    """UserError unless MODEL can be compressed, as far as that is known before its import."""
    if is_base(model) or is_run(model):
        found = load_model(model)
        if not isinstance(found, Transformer) or found.initial_spec.input_kind != "tokens":
            raise UserError(
                f"{str(model)!r} holds no built-in transformer that reads tokens, which compress "
                "needs; write a config for its own task, and give it to gaugelasso train"
            )
        parameters = sum(parameter.numel() for parameter in found.parameters())
        return Given(found.initial_spec.causal, parameters)
    source = importing.open_source(model)
    return Given(importing.is_causal(source), source.parameters)


def check_tokenizer(model: Path) -> None:
    """UserError if MODEL has no tokenizer, or none can be read here."""
    if (why := missing_tokenizer(model)) is not None:
        raise UserError(
            f"{str(model)!r} has no tokenizer, which text needs ({why}); name one with --set "
            "task.tokenizer=FILE, or give tokens as .npy with --data"
        )


def is_base(model: Path) -> bool:
    """Whether it is a folder that import wrote."""
    return _is_own(model) and is_imported(model)


def is_run(model: Path) -> bool:
    """Whether it is a run folder."""
    return _is_own(model) and not is_imported(model)


def _is_own(model: Path) -> bool:
    """Whether its config.json is one of ours; a source's has no section of a task."""
    path = model / "config.json"
    if not is_folder(model) or not exists(path):
        return False
    config = read_json(path, finite=False)
    return isinstance(config, dict) and isinstance(config.get("task"), dict)
