"""Measures the speed of models at inference: a run's, its initial one, and a uniform one.

Gives medians and quartiles over repetitions on random batches of a config's task, or of the sizes
that are asked for.
"""

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.bench.measure import Row, work_per_token
from gaugelasso.bench.stopwatch import in_turns, quartiles
from gaugelasso.config import Config, ModelConfig
from gaugelasso.config.activations import cached, check_activations, widest
from gaugelasso.errors import UserError
from gaugelasso.inference import InferenceModel, tuned
from gaugelasso.kernels import reference_kernels
from gaugelasso.kernels.cuda_graph import GraphedStep
from gaugelasso.memory import says_what_fits
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs import checkpoint
from gaugelasso.runs.structures import Structure
from gaugelasso.tasks import Draw
from gaugelasso.tasks.protocol import positions
from gaugelasso.training.evaluation import autocast, in_bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is served: so many sequences of so many positions; None: those of the training.

    With `decode`, one more token of each sequence, the last that fits into a cache of this length.
    """

    batch: int | None = None
    length: int | None = None
    decode: bool = False

    def suffix(self, config: Config) -> str:
        """What a name of a row says about sizes that are not those of the training."""
        if self == AS_TRAINED:
            return ""
        length = "" if self.length is None else f"x{self.length}"
        return f"-{self.batch or config.train.batch}{length}" + ("-decode" if self.decode else "")

    def check(
        self, model: Compressible, longest: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        """UserError if a model for sequences of up to `longest` cannot be served in these sizes."""
        if not isinstance(model, Transformer):
            if self.length is not None or self.decode:
                raise UserError(
                    f"the model is a {type(model).__name__}; --length and --decode are for the "
                    "built-in transformer"
                )
            return
        spec = model.spec()
        if self.length is not None and self.length > longest:
            raise UserError(
                f"--length {self.length}: the model's sequences have {longest} tokens at most"
            )
        if self.decode:
            InferenceModel(model).check_generates()
        if self.batch is not None:
            each = cached(spec) if self.decode else widest(spec)
            remedy = "lower it or --length"
            length = self.length or longest
            what = "keys and values" if self.decode else "activations per layer"
            check_activations(
                each, length, self.batch, "--batch", remedy, device, dtype.itemsize, what
            )


AS_TRAINED = Sizes()


def narrowed(full: ModelConfig, width: int) -> ModelConfig:
    """Return the model with this width, and d_k, d_v and d_f in proportion; heads stay."""
    share, pair = width / full.width, 2 if full.rope else 1
    return dataclasses.replace(
        full,
        width=width,
        d_k=max(pair, pair * round(full.d_k * share / pair)),
        d_v=max(1, round(full.d_v * share)),
        d_f=max(1, round(full.d_f * share)),
    )


def uniform_like(config: Config, fma: float) -> TransformerSpec:
    """Return the config's transformer, narrowed evenly until its work is nearest to `fma`."""
    full = config.model
    assert isinstance(full, ModelConfig)

    def spec(width: int) -> TransformerSpec:
        return narrowed(full, width).spec(config.task)

    def work(width: int) -> float:
        return work_per_token(Transformer(spec(width)))

    above = bisect.bisect_left(range(1, full.width), fma, key=work) + 1
    return spec(min((max(above - 1, 1), above), key=lambda width: abs(work(width) - fma)))


@torch.inference_mode()
def bench_inference(
    models: Mapping[str, Compressible],
    config: Config,
    device: str,
    repeats: int,
    served: bool = False,
    sizes: Sizes = AS_TRAINED,
) -> dict[str, Row]:
    """Measure the latency of one sequence and the throughput of a batch, the models in turns.

    With `served`, every built-in transformer has a second row, `NAME-served`: its inference form
    (on a GPU, a CUDA graph), tuned for each of the two sizes, in the precision of the config. The
    steps of `sizes.decode` need a cache, so they have that row alone.
    """
    dtype = torch.bfloat16 if in_bfloat16(config, device) else torch.float32
    rows: dict[str, Row] = {}
    for name, model in models.items():
        sizes.check(model, positions(config.task), device, dtype)
        figures: Row = {"model": name, "fma": work_per_token(model.to(device).eval())}
        figures["weight_bytes"] = sum(each.nbytes for each in named_tensors(model).values())
        if not sizes.decode:
            rows[name] = {"form": "training", **figures, "quartiles": {}}
        if served and isinstance(model, Transformer):
            form = {"form": "inference", **figures, "quartiles": {}}
            rows[f"{name}-served"] = form | _memory(InferenceModel(model, dtype=dtype))
    batch = sizes.batch or config.train.batch
    for figure, size in (("latency_ms", 1), ("batch_ms", batch)):
        inputs, _ = config.task.batch(size, Draw(config.train.seed), device)
        inputs = inputs if sizes.length is None else inputs[:, : sizes.length]
        with says_what_fits(size, device):
            serving = _serving(models, rows, inputs, config, dtype, sizes.decode)
            timed = in_turns(serving, device, repeats)
        for name, times in timed.items():
            rows[name][figure] = statistics.median(times)
            rows[name]["quartiles"][figure] = quartiles(times)
    length = sizes.length or positions(config.task)
    tokens = 1 if sizes.decode else length
    for row in rows.values():
        row |= {"batch": batch, "length": length, "decode": sizes.decode}
        row["tokens_per_s"] = 1000 * batch * tokens / row["batch_ms"]
    return rows


def _serving(
    models: Mapping[str, Compressible],
    rows: Mapping[str, Row],
    inputs: Tensor,
    config: Config,
    dtype: torch.dtype,
    decode: bool,
) -> dict[str, Callable[[], Any]]:
    """What each of the rows does with the inputs."""
    serving: dict[str, Callable[[], Any]] = {}
    for name, model in models.items():
        if name in rows:
            device = str(inputs.device)
            serving[name] = partial(_train_form, model, inputs, config, device)
        if f"{name}-served" in rows and isinstance(model, Transformer):
            serving[f"{name}-served"] = (_step if decode else _pass)(model, inputs, dtype)
    return serving


def _train_form(model: Compressible, inputs: Tensor, config: Config, device: str) -> None:
    with reference_kernels(not config.train.fused), autocast(config, device):
        model(inputs)


def _pass(model: Transformer, inputs: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    captured = tuned(model, inputs, dtype=dtype).captured()
    return partial(captured.reserve(*inputs.shape[:2]), inputs)


def _step(model: Transformer, inputs: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    batch, length = inputs.shape[:2]
    served = tuned(model, inputs[:, :1], dtype=dtype)
    cache, tokens = served.new_cache(batch, length), inputs[:, -1].contiguous()

    def step() -> None:
        cache.hold_(length - 1)
        served.decode(tokens, cache, static=inputs.is_cuda)

    return GraphedStep(step, inputs.is_cuda)


def _memory(served: InferenceModel) -> Row:
    cache = {"cache_bytes_per_token": served.cache_bytes_per_token} if served.generates else {}
    return {"weight_bytes": served.weight_bytes, **cache}


def bench_run(
    run: Path, work: str, config: Config, device: str, repeats: int, sizes: Sizes = AS_TRAINED
) -> Iterator[tuple[str, Row]]:
    """Time a run's model, its initial one and a uniform one of equal work, on each device.

    Each also in its inference form. How to narrow a model of the user, or one that began with the
    weights of model.from, is not known: they have no uniform one. The former has no inference form.
    """
    compressed = checkpoint.load_model(run)
    models = {"ancestor": Structure.read(run / "initial.json").build()}
    if isinstance(config.model, ModelConfig):
        models["uniform"] = Transformer(uniform_like(config, work_per_token(compressed)))
    models["compressed"] = compressed
    work += sizes.suffix(config)
    for kind in dict.fromkeys(["cpu", device]):
        rows = bench_inference(models, config, kind, repeats, served=True, sizes=sizes)
        for name, row in rows.items():
            yield f"{work}-{name}-{kind}", {"device": kind, **row}
