"""Libraries that a form needs and that a plain installation does not bring."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator

from gaugelasso.errors import UserError, first_line

# Form -> the extra that brings its libraries, and their modules.
EXTRAS = {
    "onnx": ("onnx", ("onnx", "onnxscript", "onnxruntime")),
    "hf": ("hf", ("transformers", "tokenizers")),
    "llama": ("hf", ("transformers", "tokenizers")),
}


def check_extra(form: str) -> None:
    """UserError with the command that installs it, if a library of the form is missing."""
    extra, modules = EXTRAS.get(form, ("", ()))
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"form {form!r} needs {module} ({first_line(error)}): "
                f"pip install 'gaugelasso[{extra}]'"
            ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what exporters say about themselves; what they write is compared anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
