"""Export: the model of a finished run in a form that other programs load.

Every form is loaded again and compared with the float32 inference form before its folder gets its
name. Knows run folders and the inference form, nothing of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gaugelasso.errors import UserError
from gaugelasso.export.card import write_card
from gaugelasso.export.comparison import Say
from gaugelasso.export.extras import check_extra
from gaugelasso.export.fastest import OnCpu, fastest_on_cpu
from gaugelasso.export.source import Source, read_source
from gaugelasso.export.stock import check_like_llama
from gaugelasso.export.to_gguf import check_gguf, write_gguf
from gaugelasso.export.to_hf import write_hf
from gaugelasso.export.to_llama import write_llama
from gaugelasso.export.to_native import write_native
from gaugelasso.export.to_onnx import write_onnx
from gaugelasso.export.to_pt2 import write_pt2
from gaugelasso.files.durable import write_new
from gaugelasso.files.tokenizer import read_files
from gaugelasso.runs.new_folder import check_free, new_folder

# Source, folder, precision, device, and what gets a line for each stage -> the largest deviation
# from the float32 inference form, relative to the spread of the outputs.
Writer = Callable[[Source, Path, torch.dtype, str, Say], float]
FORMS: Mapping[str, Writer] = {
    "onnx": write_onnx,
    "pt2": write_pt2,
    "hf": write_hf,
    "llama": write_llama,
    "gguf": write_gguf,
    "native": write_native,
}
# Forms for models whose layers are alike.
STOCK = ("llama", "gguf")
# Forms that have the tokenizer in their own way; the others have its files beside them.
_WITH_TOKENIZER = ("hf", *STOCK)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """A written folder. `deviation` is relative to the spread of the outputs."""

    folder: Path
    form: str
    deviation: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.form}: {self.bytes / 2**20:.1f} MiB, loaded again and compared: outputs off by "
            f"{self.deviation:.2g} of their spread at most"
        )


def export(
    run: Path,
    form: str,
    out: Path | None = None,
    dtype: str = "float32",
    device: str = "auto",
    say: Say = lambda line: None,
) -> Exported:
    """Write the model of a finished run in one of `FORMS` to a new folder.

    `out` is `export/FORM` in the run folder unless given. `device` is where a compiled form will
    run; "auto" means every kind of device that is here. `say` gets a line when a stage begins, as
    tracing a file or comparing it. UserError, with nothing written, for an unfinished or damaged
    run, a missing library, an existing folder, or a model that the form cannot hold.
    """
    if form not in FORMS:
        raise UserError(f"form {form!r} is unknown; choose one of: {', '.join(FORMS)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose one of: {', '.join(DTYPES)}")
    source = read_source(run)
    out = run / "export" / form if out is None else out
    check_free(out)
    check_extra(form)
    with new_folder(out) as folder:
        deviation = FORMS[form](source, folder, DTYPES[dtype], device, say)
        if source.has_tokenizer and form not in _WITH_TOKENIZER:
            for name, content in read_files(run).items():
                write_new(folder / name, [content])
        write_card(source, form, folder, out, DTYPES[dtype], deviation)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Exported(out, form, deviation, size)


__all__ = [
    "DTYPES",
    "FORMS",
    "STOCK",
    "Exported",
    "OnCpu",
    "Source",
    "check_gguf",
    "check_like_llama",
    "export",
    "fastest_on_cpu",
    "read_source",
]
