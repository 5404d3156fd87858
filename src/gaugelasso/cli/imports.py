"""The command that turns a pretrained model of another library into a folder of this one."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.output import print_line
from gaugelasso.importing.folder import write_imported


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", help="Hugging Face folder, or GGUF file."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
) -> None:
    """Import a pretrained model: write it as a folder to train from and to evaluate.

    A Hugging Face folder has config.json and safetensors; pickled weights and models with code of
    their own are refused. Where transformers is installed, the logits of such a folder are
    compared with those of transformers. Tokenizer files are copied. From the tokenizer of a GGUF
    file a tokenizer.json is made.

    Llama, Mistral, Qwen2, Qwen3, GPT-2, BERT, RoBERTa, DistilBERT and ViT models are read. A model
    that the transformer here cannot represent exactly is refused.

    Example: gaugelasso import models/SmolLM2-135M --out bases/smol

    Example: gaugelasso import SmolLM2-135M.Q8_0.gguf --out bases/smol

    Example: gaugelasso eval bases/smol --data books.txt --tokens 100000
    """
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
    tokens = found.tokenizer
    print_line(f"tokenizer: {tokens if isinstance(tokens, str) else f'{tokens:,} tokens'}")
    print_line(f"folder: {found.folder}")
