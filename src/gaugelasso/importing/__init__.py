"""Importing: pretrained models of other libraries as the transformer of this one.

Reads Hugging Face folders (safetensors) and GGUF files as data: nothing that they hold is run or
unpickled. A model that the transformer cannot represent exactly is refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from gaugelasso.errors import UserError
from gaugelasso.importing import (
    bert,
    distilbert,
    gpt2,
    llama,
    mistral,
    qwen2,
    qwen3,
    roberta,
    vit,
)
from gaugelasso.importing.gguf import open_gguf
from gaugelasso.importing.safetensors_folder import open_folder
from gaugelasso.importing.source import Source
from gaugelasso.models import Transformer
from gaugelasso.runs.reading import exists, is_folder

# The name of an architecture in a folder or in a GGUF file -> what builds its model.
ARCHITECTURES: Mapping[str, Callable[[Source], Transformer]] = {
    "LlamaForCausalLM": llama.from_folder,
    "MistralForCausalLM": mistral.from_folder,
    "Qwen2ForCausalLM": qwen2.from_folder,
    "Qwen3ForCausalLM": qwen3.from_folder,
    "GPT2LMHeadModel": gpt2.from_folder,
    "BertModel": bert.from_folder,
    "BertForMaskedLM": bert.from_folder,
    "RobertaModel": roberta.from_folder,
    "RobertaForMaskedLM": roberta.from_folder,
    "DistilBertModel": distilbert.from_folder,
    "DistilBertForMaskedLM": distilbert.from_folder,
    "ViTModel": vit.from_folder,
    "ViTForImageClassification": vit.from_folder,
    "llama": llama.from_gguf,
    "qwen2": qwen2.from_gguf,
    "qwen3": qwen3.from_gguf,
}
# Folders that the documentation keeps models in: no owners of a model in the hub.
_LOCAL = ("models", "bases", "runs")
_ENCODERS = (bert.from_folder, roberta.from_folder, distilbert.from_folder, vit.from_folder)


def import_model(path: Path | str) -> Transformer:
    """The model of a Hugging Face folder or of a GGUF file, in float32 on the CPU.

    UserError names the file and the reason if it is damaged, or if it holds something that the
    transformer cannot represent. Where the source shares its embedding with its head, so does the
    model, except encoders like BERT.
    """
    return build(open_source(path))


def open_source(path: Path | str) -> Source:
    """Settings and tensors of a folder, or of a GGUF file."""
    path = Path(path)
    if not exists(path):
        raise UserError(f"{str(path)!r}: no such file or folder{_download(path)}")
    return open_folder(path) if is_folder(path) else open_gguf(path)


def _download(path: Path) -> str:
    """How to get a model by its name in the hub, if the path can be such a name."""
    if path.is_absolute() or len(path.parts) > 2 or path.suffix == ".gguf":
        return ""
    name = f"OWNER/{path.name}" if path.parts[0] in _LOCAL else str(path)
    return (
        "; names of the Hugging Face hub are not downloaded, so if it is one, run hf download "
        f"{name} --local-dir models/{path.name}, and give that folder"
    )


def build(source: Source) -> Transformer:
    check_known(source)
    return ARCHITECTURES[source.architecture](source)


def check_known(source: Source) -> None:
    """UserError if no model of this architecture can be imported."""
    name = source.architecture
    if name not in ARCHITECTURES:
        raise UserError(
            f"{str(source.settings.path)!r}: the architecture {name[:60]!r} cannot be imported; "
            f"known are: {', '.join(ARCHITECTURES)}"
        )


def is_causal(source: Source) -> bool:
    """Whether its model is causal, which the architecture says before any tensor is read."""
    check_known(source)
    return ARCHITECTURES[source.architecture] not in _ENCODERS


def check_reads_tokens(source: Source) -> None:
    """UserError if no loss on a text can be measured of its model."""
    name = source.architecture
    if name.startswith("ViT") or (name.endswith("Model") and not is_causal(source)):
        what = "reads images" if name.startswith("ViT") else "has no head that predicts tokens"
        raise UserError(
            f"{str(source.settings.path)!r}: a {name} {what}, so it has no loss on a text; import "
            "it without --data"
        )


__all__ = [
    "ARCHITECTURES",
    "build",
    "check_known",
    "check_reads_tokens",
    "import_model",
    "is_causal",
    "open_source",
]
