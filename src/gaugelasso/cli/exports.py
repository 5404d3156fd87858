"""The command that writes a run's model in a form that other programs load."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import RunPath
from gaugelasso.cli.output import print_line
from gaugelasso.export import DTYPES, FORMS
from gaugelasso.export import export as write_export
from gaugelasso.training.evaluation import choose_device


def export(
    run: RunPath,
    form: Annotated[str, typer.Option(metavar="|".join(FORMS), help="Form to write.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; must not exist.", show_default="RUN/export/FORM"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="Precision of the weights.")
    ] = "float32",
    device: Annotated[
        str,
        typer.Option(help="Device that pt2 is compiled for: cpu, cuda, or auto for all there are."),
    ] = "auto",
) -> None:
    """Write the model of a finished run, or an imported one, for other programs, with a model card.

    onnx: for onnxruntime, with and without a key/value cache. pt2: a torch.export program and
    AOTInductor packages. hf: a folder for AutoModelForCausalLM.from_pretrained. llama: the same as
    a stock LlamaForCausalLM, if all layers are equal. gguf: such a model for llama.cpp. native:
    safetensors for gaugelasso.inference.load. A tokenizer in RUN is copied.

    What is written is loaded again and compared with the model first; if it differs, nothing is
    kept.

    Example: gaugelasso export runs/small --form hf --out models/small

    Example: gaugelasso export runs/small --form onnx

    Example: gaugelasso export runs/small --form native --dtype bfloat16

    Example: gaugelasso export bases/smol --form gguf --dtype float16
    """
    where = device if device == "auto" else choose_device(device)
    exported = write_export(run, form, out, dtype, where, print_line)
    print_line(str(exported))
    print_line(f"folder: {exported.folder}")
