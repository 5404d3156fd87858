"""Generates tokens with an `InferenceModel`, for a batch of prompts of unequal lengths.

Everything per token happens on the device. The host waits for it once in a block of tokens,
to hand them out and to see whether all sequences have stopped. It knows all positions without
asking, because every step adds one token to every sequence.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gaugelasso.inference.cache import Cache
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.sampling import Sampling, refresh_
from gaugelasso.inference.stream import statistics_dtype
from gaugelasso.models import SpecError

# In place of a token, for a sequence that has stopped.
NOTHING = -1
# Tokens between two looks of the host.
BLOCK = 16


def generate(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[int] = (),
    slide: bool = False,
) -> list[list[int]]:
    """The new tokens of every prompt, up to the first of `stop`, which is the last of them.

    Every sequence draws from its own generator, seeded by its entry of `seeds` (default: its
    number in the batch), so its draws do not depend on the others in the batch. A text that
    exceeds the model's length is refused; with `slide` its last half is read again from position
    0, as often as needed.
    """
    blocks = generate_blocks(
        model, prompts, max_new_tokens, sampling=sampling, seeds=seeds, stop=stop, slide=slide
    )
    rows: list[list[int]] = [[] for _ in prompts]
    for block in blocks:
        for row, tokens in zip(rows, block.tolist(), strict=True):
            row += [token for token in tokens if token != NOTHING]
    return rows


def generate_blocks(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[int] = (),
    slide: bool = False,
    block: int = BLOCK,
) -> Iterator[Tensor]:
    """As `generate`, in blocks [B, n] of at most `block` tokens, on the CPU.

    What follows a stop token is `NOTHING`.
    """
    model.check_generates()
    _check(model, prompts, max_new_tokens, slide)
    if seeds is not None and len(seeds) != len(prompts):
        raise SpecError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one for each")
    text = _Text(model, prompts, max_new_tokens)
    seeds = range(len(prompts)) if seeds is None else seeds
    generators = [torch.Generator(model.device).manual_seed(seed) for seed in seeds]
    return _blocks(model, text, sampling or Sampling(), generators, stop, block)


@torch.inference_mode()
def _blocks(
    model: InferenceModel,
    text: "_Text",
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    stop: Sequence[int],
    block: int,
) -> Iterator[Tensor]:
    batch, device = len(generators), model.device
    stops = torch.tensor(stop, dtype=torch.long, device=device)
    stopped = torch.zeros(batch, dtype=torch.bool, device=device)
    precision = statistics_dtype(model.dtype)
    noise = torch.empty(batch, model.spec.outputs, dtype=precision, device=device)
    logits = text.begin(model)
    shown = 0
    for step in range(text.new):
        if not sampling.greedy:
            refresh_(noise, generators)
        drawn = sampling.draw(logits.to(precision), noise)
        text.append_(drawn, stopped)
        stopped |= torch.isin(drawn, stops)
        last = step + 1 == text.new
        if last or step + 1 - shown == block:
            yield text.out[:, shown : step + 1].cpu()
            shown = step + 1
            if last or stopped.all():
                return
        logits = text.advance(model, drawn)


class _Text:
    """The tokens of a batch on the device, and the positions of the cache on the host."""

    def __init__(self, model: InferenceModel, prompts: Sequence[Sequence[int]], new: int):
        self.new, self.limit = new, model.spec.length
        self.half = max(1, self.limit // 2)
        self.counts = [len(prompt) for prompt in prompts]
        longest = max(self.counts)
        rows = [[*prompt, *[0] * (longest + new - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(rows, device=model.device)
        self.ends = torch.tensor(self.counts, device=model.device)
        self.out = torch.full((len(prompts), new), NOTHING, device=model.device)
        self.added = 0
        # Of a prompt that is longer than the model, the last half is read.
        self.filled = [n if n <= self.limit else self.half for n in self.counts]
        length = min(self.limit, longest + new)
        self.cache: Cache = model.new_cache(len(prompts), length)

    def begin(self, model: InferenceModel) -> Tensor:
        """Read the prompts; logits [B, V] of the first new tokens."""
        size = max(self.filled)
        starts = [n - used for n, used in zip(self.counts, self.filled, strict=True)]
        index = torch.tensor(starts)[:, None] + torch.arange(size)
        index = index.clamp(max=self.tokens.shape[1] - 1).to(model.device)
        lengths = torch.tensor(self.filled, device=model.device)
        return model.prefill(self.tokens.gather(1, index), self.cache, lengths)

    def append_(self, drawn: Tensor, stopped: Tensor) -> None:
        self.tokens.scatter_(1, self.ends[:, None], drawn[:, None])
        self.ends += 1
        self.out[:, self.added] = torch.where(stopped, NOTHING, drawn)
        self.added += 1

    def advance(self, model: InferenceModel, drawn: Tensor) -> Tensor:
        """Read the drawn tokens [B]; logits [B, V] of the next ones."""
        full = [row for row, filled in enumerate(self.filled) if filled == self.limit]
        if full:
            # The drawn token, the last of the half, follows in the step of all sequences.
            kept = self.half - 1
            rows = torch.tensor(full, device=model.device)
            if kept:
                stops = [self.counts[row] + self.added - 1 for row in full]
                parts = [
                    self.tokens[row, stop - kept : stop]
                    for row, stop in zip(full, stops, strict=True)
                ]
                model.prefill(torch.stack(parts), self.cache, rows=rows)
            else:
                self.cache.positions[rows] = 0
            for row in full:
                self.filled[row] = kept
        self.cache.longest = max(self.filled)
        self.filled = [filled + 1 for filled in self.filled]
        return model.decode(drawn, self.cache)


def _check(model: InferenceModel, prompts: Sequence[Sequence[int]], new: int, slide: bool) -> None:
    if not prompts:
        raise SpecError("there are no prompts; give at least one")
    if new < 1:
        raise SpecError(f"max_new_tokens = {new}: must be at least 1")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise SpecError("the prompt is empty; give at least one token")
        for token in prompt:
            if not 0 <= token < model.spec.inputs:
                raise SpecError(
                    f"prompt {number} contains token {token}; the model knows 0 to "
                    f"{model.spec.inputs - 1}"
                )
        # The last new token is not read.
        needed = len(prompt) + new - 1
        if needed > model.spec.length and not slide:
            raise SpecError(
                f"prompt {number} of {len(prompt)} tokens with {new} new ones needs {needed} "
                f"positions, and the model has {model.spec.length}; shorten it or use slide=True"
            )
    if model.spec.outputs > model.spec.inputs:
        raise SpecError(
            f"the model has {model.spec.outputs} outputs for {model.spec.inputs} tokens, so it "
            "cannot read what it writes"
        )
