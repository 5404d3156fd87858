"""The command that turns a pretrained model of another library into a folder of this one."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from gaugelasso.cli.arguments import Device, TextTokens, keys_as_options
from gaugelasso.cli.compression_given import check_tokenizer
from gaugelasso.cli.evaluation import TEXT_OPTIONS, describe_figures, describe_text
from gaugelasso.cli.output import print_line
from gaugelasso.config.imported import imported_config
from gaugelasso.errors import UserError
from gaugelasso.importing import check_reads_tokens, open_source
from gaugelasso.importing.folder import Imported, write_imported
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.reading import exists
from gaugelasso.runs.writing import remove
from gaugelasso.tasks import TokenText
from gaugelasso.tasks.stored import expand
from gaugelasso.training.evaluation import autocast, choose_device, predictor


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="Hugging Face folder, or GGUF file."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Measure the loss on this text: a file, a folder, or tokens as .npy. As eval "
            "--data does, and of the original too where it can be run.",
        ),
    ] = None,
    tokens: TextTokens = 0,
    length: Annotated[
        int,
        typer.Option(min=0, help="With --data: tokens of a window; 0: 512, or the context."),
    ] = 0,
    device: Device = None,
) -> None:
    """Import a pretrained model: write it as a folder to train from and to evaluate.

    A Hugging Face folder has config.json and safetensors; pickled weights and models with code of
    their own are refused. Where transformers is installed, and for a GGUF file the package gguf
    too, the logits are compared with those of transformers. Tokenizer files are copied. From the
    tokenizer of a GGUF file a tokenizer.json is made.

    Llama, Mistral, Qwen2, Qwen3, GPT-2, BERT, RoBERTa, DistilBERT and ViT models are read. A model
    that the transformer here cannot represent exactly is refused.

    Example: gaugelasso import models/SmolLM2-135M --out bases/smol

    Example: gaugelasso import SmolLM2-135M.Q8_0.gguf --out bases/smol

    Example: gaugelasso import models/SmolLM2-135M --out bases/smol --data valid.txt --tokens 10000
    """
    if data is None and (tokens or length or device):
        raise UserError("--tokens, --length and --device belong to --data, which is not given")
    where = choose_device(device or "auto")
    if data is not None:
        _check_text(source, data)
    found = write_imported(source, out)
    print_line(
        f"parameters: {found.parameters:,} ({found.source_parameters:,} in the source; "
        f"{found.changes})"
    )
    print_line(f"FMA per token: {found.fma:,.0f} (mean over a context of {found.length:,} tokens)")
    if isinstance(found.difference, str):
        print_line(f"logits not compared: {found.difference}")
    else:
        print_line(f"largest difference of logits from transformers: {found.difference}")
    count = found.tokenizer
    print_line(f"tokenizer: {count if isinstance(count, str) else f'{count:,} tokens'}")
    if data is not None:
        try:
            with keys_as_options(TEXT_OPTIONS):
                _measure(found, data, tokens, length, where)
        except UserError:
            remove(out)  # as with any other option that does not fit, nothing is written
            raise
    print_line(f"folder: {found.folder}")


def _check_text(source: Path, data: str) -> None:
    """UserError if the model cannot read this text, as far as it is known before the import."""
    check_reads_tokens(open_source(source))
    if not exists(expand(data, "--data")):
        raise UserError(f"--data {data!r}: no such file or folder")
    if not data.endswith(".npy"):
        check_tokenizer(source)


def _measure(found: Imported, data: str, tokens: int, length: int, device: str) -> None:
    """Print loss and bits of a text: those of the original, where it was loaded, and of the import.

    Both read the same windows, in the same precision.
    """
    settings = imported_config(found.folder, data, length)
    task, reference = settings.task, found.reference
    assert isinstance(task, TokenText)
    shown = describe_text(task, data, tokens)
    if reference is None:
        print_line(f"original not measured: {found.difference}")
    else:
        reference.model.to(device)

        @torch.no_grad()
        def original(inputs: Tensor) -> Tensor:
            with autocast(settings, device):
                return reference(inputs)

        figures = task.text_figures(original, device, tokens)
        print_line(f"original: {describe_figures(figures, shown)}")
        reference.model.cpu()
    model = load_model(found.folder, device)
    figures = task.text_figures(predictor(model, settings, device), device, tokens)
    print_line(f"imported: {describe_figures(figures, shown)}")
