"""Generates tokens with an `InferenceModel`, for a batch of prompts of unequal lengths.

Everything per token happens on the device. The host waits for it once in a block of tokens,
to hand them out and to see whether all sequences have stopped. It knows all positions without
asking, because every step adds one token to every sequence.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gaugelasso.inference.checks import check_count, checked_seeds, prompt_tokens, whole_number
from gaugelasso.inference.graphs import NOTHING, Captured, Decoder
from gaugelasso.inference.model import InferenceModel
from gaugelasso.inference.passes import PassModel
from gaugelasso.inference.sampling import Sampling
from gaugelasso.memory import check_fits, says_what_fits
from gaugelasso.models import SpecError

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

    What follows a stop token is `NOTHING`. UserError, with the number that would fit, for more
    prompts than the memory has room for.
    """
    model.check_generates()
    tokens = _checked(model, prompts, max_new_tokens, slide)
    starts = checked_seeds(seeds, len(tokens))
    stops = [whole_number(token, "stop contains") for token in stop]
    text = _Text(model.captured(), tokens, max_new_tokens)
    return _blocks(text, sampling or Sampling(), starts, stops, block)


@torch.inference_mode()
def _blocks(
    text: "_Text", sampling: Sampling, seeds: list[int], stop: Sequence[int], block: int
) -> Iterator[Tensor]:
    real = len(seeds)
    seeds = seeds + [0] * (text.batch - real)
    model = text.captured.model
    with (
        says_what_fits(real, model.device),
        text.captured.decoder(text.batch, text.length, sampling, block) as decoder,
    ):
        _check_prompts(model, text)
        decoder.begin_(seeds, stop, real)
        text.begin(decoder)
        shown = 0
        for step in range(1, text.new + 1):
            last = step == text.new
            if last or step - shown == block:
                # A copy: the next block overwrites it.
                yield decoder.out[:real, : step - shown].clone().cpu()
                shown = step
                if last or decoder.stopped.all():
                    return
                decoder.rewind_()
            text.advance(decoder)


def _check_prompts(model: PassModel, text: "_Text") -> None:
    """UserError if what is read at once has no place: a lower bound, as attention needs more."""
    spec = model.spec
    filters = (each.filters for each in spec.operators if each.kind == "mlp")
    read = max(text.filled) * max(len(spec.sites), *filters, 0) + spec.outputs
    what = f"reading prompts of up to {max(text.filled):,} tokens"
    check_fits(read * model.dtype.itemsize, text.batch, what, model.device)


class _Text:
    """The tokens of a batch on the device, and the positions of the cache on the host.

    On a GPU the batch is filled up to a bucket with more sequences of the shortest prompt.
    """

    def __init__(self, captured: Captured, prompts: Sequence[Sequence[int]], new: int):
        model = captured.model
        self.captured, self.new, self.limit = captured, new, model.spec.length
        self.half = max(1, self.limit // 2)
        longest = max(map(len, prompts))
        needed = min(self.limit, longest + new)
        self.batch, self.length = captured.bucket(len(prompts), needed)
        self.prompts = [*prompts, *[min(prompts, key=len)] * (self.batch - len(prompts))]
        self.counts = [len(prompt) for prompt in self.prompts]
        # Of a prompt that is longer than the model, the last half is read.
        self.filled = [n if n <= self.limit else self.half for n in self.counts]
        self.added = 0
        self.tokens: Tensor | None = None
        if longest + new - 1 > self.limit:  # a text that slides is read again
            rows = [[*prompt, *[0] * (longest + new - len(prompt))] for prompt in self.prompts]
            self.tokens = torch.tensor(rows, device=model.device)
            self.ends = torch.tensor(self.counts, device=model.device)

    def begin(self, decoder: Decoder) -> None:
        """Read the prompts, and draw the first new tokens."""
        size = max(self.filled)
        ends = [
            list(prompt[-used:]) for prompt, used in zip(self.prompts, self.filled, strict=True)
        ]
        rows = torch.tensor([[*row, *[0] * (size - len(row))] for row in ends])
        decoder.prefill(rows, torch.tensor(self.filled))
        self._remember(decoder.drawn)

    def _remember(self, drawn: Tensor) -> None:
        self.added += 1
        if self.tokens is not None:
            self.tokens.scatter_(1, self.ends[:, None], drawn[:, None])
            self.ends += 1

    def advance(self, decoder: Decoder) -> None:
        """Read the tokens that were drawn last, and draw the next."""
        cache = decoder.cache
        full = [row for row, filled in enumerate(self.filled) if filled == self.limit]
        if full and self.tokens is not None:
            # The drawn token, the last of the half, follows in the step of all sequences.
            kept = self.half - 1
            rows = torch.tensor(full, device=cache.positions.device)
            if kept:
                stops = [self.counts[row] + self.added - 1 for row in full]
                parts = [
                    self.tokens[row, stop - kept : stop]
                    for row, stop in zip(full, stops, strict=True)
                ]
                decoder.model.prefill(torch.stack(parts), cache, rows=rows)
            else:
                cache.positions[rows] = 0
            for row in full:
                self.filled[row] = kept
        cache.longest = max(self.filled)
        cache.even = min(self.filled) == cache.longest
        self.filled = [filled + 1 for filled in self.filled]
        decoder.step()
        self._remember(decoder.drawn)


def _checked(
    model: InferenceModel, prompts: Sequence[Sequence[int]], new: int, slide: bool
) -> list[Sequence[int]]:
    """The tokens of every prompt; SpecError for what the model cannot continue."""
    if not len(prompts):
        raise SpecError("there are no prompts; give at least one")
    check_count("max_new_tokens", whole_number(new, "max_new_tokens is"))
    checked = [prompt_tokens(model.spec, number, each) for number, each in enumerate(prompts)]
    for number, prompt in enumerate(checked):
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
    return checked
