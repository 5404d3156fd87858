"""The tiny config: a model of a few hundred weights and a run that takes a fraction of a second."""

import json
from pathlib import Path
from typing import Any

from gaugelasso.config import Config, load_config

# Half a second on one core. The target is just below the loss of a guess; with a high learning
# rate and trust, most axes are dropped within thirty steps.
TINY = """
[task]
name = "retrieval"
vocabulary = 8
modulus = 2
length = 6

[model]
width = 8
layers = 1
heads = 2
d_k = 4
d_v = 4
d_f = 8

[target]
loss = 2.0
hold = "pressed"

[compress]
drop_tolerance = 1e9
lr = 0.04
interval = 5
trust = 1.5

[train]
seed = 3
steps = 40
warmup = 4
cooldown = 10
batch = 4
log_every = 5
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 10
device = "cpu"
"""

# The same with a tied head, for which a task needs as many tokens as outputs.
TIED = TINY.replace(
    TINY[TINY.index("[task]") : TINY.index("width")],
    '[task]\nname = "ff31"\nmodulus = 2\ndegree = 1\n\n[model]\ntied_head = true\n',
).replace("loss = 2.0", "loss = 2.6")

# Changes with which channels go from the third step on, and a run has less than half the steps.
QUICK: dict[str, Any] = {
    "compress__interval": 3,
    "compress__lr": 0.08,
    "compress__trust": 3.0,
    "train__steps": 18,
    "train__warmup": 2,
    "train__cooldown": 4,
}


def write_tiny(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY)
    return path


def tiny(folder: Path, **changes: Any) -> Config:
    """The tiny config with changes, as in train__steps=10."""
    return load_config(write_tiny(folder), settings(**changes))


def settings(**changes: Any) -> dict[str, str]:
    """Changes as the command line takes them."""
    return {key.replace("__", "."): json.dumps(value) for key, value in changes.items()}
