"""The config of a run with pretrained weights."""

import json
from pathlib import Path
from typing import Any

from gaugelasso.config import Config, load_config

MODEL = """
[task]
name = "tokens"
path = "train.txt"
valid = "valid.txt"
length = 16

[model]
from = "base"
"""

PRESSED = """
[target]
loss = 5.5
hold = "pressed"

[compress]
lr = 0.01
interval = 5
drop_tolerance = 1e9

[train]
steps = 20
warmup = 2
cooldown = 4
batch = 2
log_every = 5
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 10
device = "cpu"
"""

COURSE = """
[target]
fma = 20000.0

[train]
steps = 40
batch = 2
log_every = 5
eval_every = 20
eval_batches = 1
final_batches = 2
checkpoint_every = 20
device = "cpu"
"""

CONFIG = MODEL + PRESSED


def config(**changes: Any) -> Config:
    """The config in the working directory, with changes; `__` stands for a dot."""
    texts = {key.replace("__", "."): json.dumps(value) for key, value in changes.items()}
    return load_config(Path("run.toml"), texts)
