"""Options of the command that cut a tiny model, and the model and texts for them."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 300
SHARE = 9.0
# A few steps that cut: far too fast and far too high a price for a real model.
OPTIONS = (
    *("--data", "text.txt", "--valid", "valid.txt", "--above-original", f"{SHARE:.0%}"),
    *("--steps", "30", "--batch", "4", "--length", "16", "--device", "cpu", "--out", "out"),
    *("--set", "compress.lr=0.05", "--set", "compress.interval=5"),
    *("--set", "compress.drop_tolerance=1e9", "--set", "train.eval_every=10"),
)


def prose(sentences: int, seed: int) -> str:
    """Sentences of a small grammar: easy to learn, and no two texts are alike."""
    random = np.random.default_rng(seed)
    words = [["The", "A"], ["quick", "lazy", "brown"], ["fox", "dog"], ["jumps", "sleeps"],
             ["over", "in"], ["the house.", "the dogs.", "it."]]  # fmt: skip
    return " ".join(str(random.choice(part)) for _ in range(sentences) for part in words)


def save_trained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Train a model a little on prose, and write it with its tokenizer."""
    tokens = torch.tensor(tokenizer.encode(prose(400, 2)).ids)
    windows = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(40):
        batch = windows[torch.arange(8) + 8 * step % (len(windows) - 8)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def changed(*more: str) -> tuple[str, ...]:
    """The options with others in place of the last of their name."""
    return (*OPTIONS, *more)


def table_row(said: str, name: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.split("│")[2:-1]]
