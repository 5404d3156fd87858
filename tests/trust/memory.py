"""The memory of runs: over many events, after a resume, and with damaged files."""

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from gaugelasso import cli
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.events import Drop
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Measures the peak memory of this process above what it used at the start of the block."""

    def __enter__(self) -> "Peak":
        self._before = resident()
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        status = Path("/proc/self/status").read_text()
        most = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        self.bytes = max(0, int(most.split()[1]) * 1024 - self._before)


def memory_over_events(events: int, settled: int = 50) -> tuple[int, int, int]:
    """Return the bytes after `settled` events and after `events` more, and the number with drops.

    Measured in a new process that is set up as by the command line.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_over_events, (events, settled))


def _over_events(events: int, settled: int) -> tuple[int, int, int]:
    cli.set_up_process()
    torch.set_num_threads(1)
    filters = events // 2 + settled
    spec = TransformerSpec.uniform(
        width=16, layers=2, heads=2, d_k=8, d_v=8, d_f=filters, length=8, inputs=16, outputs=16
    )
    model = Transformer(spec)
    # Every index is close enough to zero to be dropped at every step; the hook allows one filter.
    options = CompressorOptions(interval=1, trust=1e9)
    compressor = Compressor(model, loss_target=1e3, options=options)

    @compressor.on_drop
    def one_filter(drop: Drop) -> tuple[int, ...] | bool:
        return drop.indices[:1] if drop.axis == f"operators.mlp_{drop.step % 2}.d_f" else False

    generator = torch.Generator().manual_seed(0)
    before = 0
    for step in range(settled + events):
        if step == settled:
            before = resident()
        tokens = torch.randint(16, (4, 8), generator=generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        compressor.step(loss)
    cut = sum(bool(event.dropped) for event in compressor.history[settled:])
    return before, resident(), cut


_LARGE = """
[task]
name = "retrieval"
vocabulary = 8000
modulus = 2
length = 16

[model]
width = 256
layers = 3
heads = 4
d_k = 64
d_v = 64
d_f = 1024

[target]
loss = 20.0

[compress]
interval = 1
trust = 0.01

[train]
steps = 6
warmup = 1
cooldown = 1
batch = 4
log_every = 1
eval_every = 3
eval_batches = 1
final_batches = 1
checkpoint_every = 2
device = "cpu"
threads = 1
"""


def peaks_of_a_run(home: Path) -> tuple[int, int]:
    """Return the peak bytes of a run of eight million weights, and of one resumed half-way."""
    config = home / "large.toml"
    config.write_text(_LARGE)
    whole = _peak(config, home / "whole")
    run = home / "resumed"
    _peak(config, run)
    newest = run / "checkpoints" / "step-00000006"
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    return whole, _peak(config, run, "--resume")


def _peak(config: Path, out: Path, *options: str) -> int:
    command = [sys.executable, "-m", "gaugelasso", "train", str(config), "--out", str(out)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024
