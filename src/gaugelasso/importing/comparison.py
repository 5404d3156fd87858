"""Compares an imported model with what transformers makes of the same Hugging Face folder.

Needs transformers, which a plain installation does not bring. Runs no code of the folder.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gaugelasso.errors import UserError, first_line
from gaugelasso.models import Transformer

# Sequences, and tokens of each: logits of a large vocabulary take much memory.
_BATCH, _LENGTH = 3, 32
# Of the standard deviation of the logits: above what float32 rounds in a deep model.
_LARGEST = 1e-3
# The class of transformers that loads an architecture, what its outputs are called, and options.
_CAUSAL: tuple[str, str, dict[str, Any]] = "AutoModelForCausalLM", "logits", {}
_AS = {
    "BertModel": ("AutoModel", "last_hidden_state", {"add_pooling_layer": False}),
    "BertForMaskedLM": ("AutoModelForMaskedLM", "logits", {}),
}


@dataclass(frozen=True)
class Difference:
    """The largest difference of two logits, and the standard deviation of the source's."""

    largest: float
    spread: float

    @property
    def share(self) -> float:
        return self.largest / self.spread if self.spread else float("inf")

    def __str__(self) -> str:
        return f"{self.largest:.2g} ({self.share:.1g} of their standard deviation)"


def compare(folder: Path, architecture: str, model: Transformer) -> Difference | str:
    """Logits of random tokens in float32, or why they are not compared; UserError if they differ.

    A difference means that the folder has a setting that the import does not know.
    """
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    try:
        expected, tokens = _of_transformers(folder, architecture, model)
    # Whatever another library raises for a model that it cannot load.
    except Exception as error:
        return f"transformers cannot load it ({type(error).__name__}: {first_line(error)})"
    training = model.training
    with torch.inference_mode():
        # In training mode the model would measure the energies of these tokens.
        off = (model.eval()(tokens) - expected).abs().max()
    model.train(training)
    found = Difference(float(off), float(expected.std()))
    if not found.share <= _LARGEST:
        raise UserError(
            f"{str(folder)!r}: the logits differ by {found} from those of transformers, so nothing "
            "was written; the model has something that is not known here"
        )
    return found


def _of_transformers(
    folder: Path, architecture: str, model: Transformer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens."""
    import transformers
    from transformers.utils import logging

    kind, output, options = _AS.get(architecture, _CAUSAL)

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it lists the tensors of other heads
    try:
        theirs = getattr(transformers, kind).from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
    spec, generator = model.spec(), torch.Generator().manual_seed(0)
    size = (_BATCH, min(spec.length, _LENGTH))
    tokens = torch.randint(spec.inputs, size, generator=generator)
    with torch.inference_mode():
        return getattr(theirs.eval()(tokens), output), tokens
