"""The command that continues a text with a language model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import Device, check_model_folder, warn_unfinished
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.inference import InferenceModel, Sampling, generate_blocks
from gaugelasso.inference.graphs import NOTHING
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.reading import exists
from gaugelasso.tasks import CharLM, Tokens
from gaugelasso.tasks.text import readable
from gaugelasso.training.evaluation import choose_device

# Tokens that are printed at once: the host waits for the device after so many.
_SHOWN_TOGETHER = 8


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or imported folder.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue.", show_default="a line break")
    ] = "\n",
    length: Annotated[
        int, typer.Option(min=1, help="Number of tokens to generate; of charlm these are bytes.")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many most likely tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the fewest tokens whose probabilities sum to this."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    device: Device = None,
) -> None:
    """Generate text with a language model: a run of charlm or tokens, or an imported model.

    A model with a tokenizer stops at the token that ends a text.

    Example: gaugelasso generate runs/books --prompt "It was a " --length 200

    Example: gaugelasso generate runs/books --temperature 0.7 --top-p 0.95 --seed 3

    Example: gaugelasso generate bases/smol --prompt "The capital of France is" --length 20
    """
    check_model_folder(run)
    if not exists(run / "tokenizer.json"):
        _check_text(run)
    where = choose_device(device or "auto")
    model = load_model(run, where).eval()
    warn_unfinished(run)
    if not isinstance(model, Transformer):
        raise UserError(
            f"{str(run)!r}: its model is a {type(model).__name__}; generate needs the built-in "
            "transformer"
        )
    language = _language(run, model.initial_spec.inputs)
    served = InferenceModel(model)
    served.step_by_numpy_()
    start = language.encode(prompt)
    sampling = Sampling(temperature, top_k, top_p)
    blocks = generate_blocks(
        served, [start], length, sampling=sampling, seeds=[seed], slide=True, block=_SHOWN_TOGETHER,
        stop=language.stop,
    )  # fmt: skip
    hidden = (NOTHING, *language.stop)
    tokens = (token for block in blocks for token in block[0].tolist() if token not in hidden)
    for piece in readable(language.decode(chain(start, tokens))):
        typer.echo(piece, nl=False)
    typer.echo()


@dataclass(frozen=True)
class _Language:
    """From text to tokens, from tokens to bytes, and the tokens that end a text."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Iterable[int]], Iterable[int]]
    stop: Sequence[int] = ()


def _language(run: Path, vocabulary: int) -> _Language:
    if not exists(run / "tokenizer.json"):
        # Python decodes bytes that are not UTF-8 to surrogates; this restores the bytes.
        return _Language(lambda text: text.encode(errors="surrogateescape"), lambda tokens: tokens)
    task = Tokens(tokenizer=str(run), vocabulary=vocabulary)

    def encode(text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("--prompt is not UTF-8 text; a tokenizer needs it") from None
        return task.reader.encode([text])[0].tolist()

    return _Language(encode, task.reader.decode, () if task.end is None else (task.end,))


def _check_text(run: Path) -> None:
    """UserError unless the tokens of the run are bytes of a text."""
    settings = run_config(run)
    if not isinstance(settings.task, CharLM):
        raise UserError(
            f"{str(run)!r} is a run of the task {settings.task_name!r}; generate needs a run of "
            "'charlm', or a folder with a tokenizer.json"
        )
