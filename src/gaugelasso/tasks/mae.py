"""Masked autoencoder: predict the hidden patches of an image from the visible ones.

Patches hold standardised pixels, and most are replaced by a learned token. The loss is the mean
squared error on the hidden patches. Training goes through the images in a new random order
every epoch, flips each at random and, with `shift`, moves it by a few pixels. Held-out images keep
their order and place, and their masks are the same in every run.

Stored held-out images are split by position: the first half is for selection, the second half
for the test. Halves, rather than every other image, because neighbours in a folder are often
pictures of the same scene. Generated images need no split: the streams draw different ones.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import images
from gaugelasso.tasks.portraits import portraits
from gaugelasso.tasks.protocol import SELECTION, TEST, TRAINING, Draw, Predict
from gaugelasso.tasks.stored import shuffled, to_device

GENERATED = "generated"
_SHOWN = 8


@dataclass(frozen=True)
class MaskedAutoencoder:
    path: str = GENERATED
    size: int = 128
    patch: int = 8
    masked: float = 0.75
    flip: bool = True
    shift: int = 0
    pictures: bool = False

    metric_name: ClassVar[str] = "masked_mse"
    metric_lower_is_better: ClassVar[bool] = True
    metric_best: ClassVar[float] = 0.0
    input_kind: ClassVar[InputKind] = "masked_patches"
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for key in ("size", "patch"):
            if not 1 <= getattr(self, key) <= 4096:
                raise UserError(f"task.{key} = {getattr(self, key)}: must be 1 to 4096")
        if not 0 <= self.shift < self.size:
            raise UserError(
                f"task.shift = {self.shift}: must be 0 (images stay in place) to "
                f"{self.size - 1}, below task.size = {self.size}"
            )
        if self.size % self.patch:
            raise UserError(
                f"task.patch = {self.patch} does not divide task.size = {self.size}: "
                "the patch size must be a divisor of the image size"
            )
        if not 0 < self.masked < 1 or not 0 < self.hidden < self.length:
            raise UserError(
                f"task.masked = {self.masked}: must hide some of the {self.length} patches and "
                "leave some visible"
            )
        if not self.path:
            raise UserError(
                "task.path is empty: give a packed .npz, a folder of images, 'generated' or "
                f"{images.CELEBA!r}"
            )

    @property
    def inputs(self) -> int:
        return 3 * self.patch**2

    @property
    def outputs(self) -> int:
        return self.inputs

    @property
    def length(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def hidden(self) -> int:
        """Masked patches of an image, the same number in all."""
        return round(self.masked * self.length)

    @property
    def has_end(self) -> bool:
        """Whether images are stored; generated ones are unlimited."""
        return self.path != GENERATED

    def stored_data(self) -> dict[str, np.ndarray]:
        if self.path == GENERATED:
            return {}
        data = images.load(self.path, self.size)
        return {
            f"training images of {self.path!r}": data.parts["train"],
            f"validation images of {self.path!r}": data.parts["valid"],
            f"colours of {self.path!r}": np.array([data.mean, data.std]),
        }

    def part(self, stream: int) -> np.ndarray:
        """The stored images that a stream draws; no two streams share one."""
        parts = images.load(self.path, self.size).parts
        valid = parts["valid"]
        if len(valid) < 2:
            raise UserError(
                f"task.path = {self.path!r} has {len(valid)} held-out image; at least 2 are "
                "needed, one for selection and one for the test: add images to the part valid"
            )
        half = len(valid) // 2
        return {TRAINING: parts["train"], SELECTION: valid[:half], TEST: valid[half:]}[stream]

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Inputs [B, S, n + 1] with hidden patches zero, and complete targets [B, S, n + 1].

        The last value of a patch is 1 where the patch is hidden.
        """
        generator = torch.Generator(device).manual_seed(_seed(draw))
        if self.path == GENERATED:
            pixels = portraits(size, self.size, generator)
        else:
            pixels = self._draw_stored(size, draw, device) / 255
        if self.flip and not draw.held_out:
            flipped = torch.rand(size, 1, 1, 1, generator=generator, device=device) < 0.5
            pixels = torch.where(flipped, pixels.flip(2), pixels)
        if self.shift and not draw.held_out:
            pixels = _moved(pixels, self.shift, generator)
        mean, std = _standard(self.path, self.size, device)
        patches = self.cut((pixels - mean) / std)
        chance = torch.rand(size, self.length, generator=generator, device=device)
        mask = torch.zeros_like(chance).scatter(1, chance.topk(self.hidden).indices, 1.0)[..., None]
        return torch.cat([patches * (1 - mask), mask], -1), torch.cat([patches, mask], -1)

    def _draw_stored(self, size: int, draw: Draw, device: str) -> Tensor:
        """The stored images [B, h, w, 3] of the draw."""
        part = self.part(draw.stream)
        positions = np.arange(draw.index * size, (draw.index + 1) * size)
        if draw.held_out:
            chosen = positions % len(part)
        else:
            chosen, _ = shuffled(positions, len(part), draw.run)
        return to_device(part[chosen], device)

    def cut(self, pixels: Tensor) -> Tensor:
        """[B, h, w, 3] -> [B, S, n], with patches row by row."""
        side, patch = self.size // self.patch, self.patch
        grid = pixels.view(-1, side, patch, side, patch, 3).transpose(2, 3)
        return grid.reshape(-1, self.length, self.inputs)

    def join(self, patches: Tensor) -> Tensor:
        """[B, S, n] -> [B, h, w, 3], the inverse of `cut`."""
        side, patch = self.size // self.patch, self.patch
        grid = patches.view(-1, side, side, patch, patch, 3).transpose(2, 3)
        return grid.reshape(-1, self.size, self.size, 3)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        patches, mask = targets[..., :-1], targets[..., -1:]
        error = (outputs.float() - patches).square() * mask
        # All images have the same number of hidden patches.
        return error.sum() / (len(targets) * self.hidden * self.inputs)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def whole_figures(
        self, predict: Predict, size: int, device: str, stream: int = TEST
    ) -> dict[str, float]:
        """Error over every image of the stream once, with the masks of `batch`."""
        count = len(self.part(stream))
        total = torch.zeros((), device=device, dtype=torch.float64)
        for index in range(math.ceil(count / size)):
            # The last batch wraps around to the first images, which are already counted.
            new = min(size, count - index * size)
            inputs, targets = self.batch(size, Draw(0, index, stream), device)
            total += new * self.loss(predict(inputs[:new]), targets[:new]).double()
        loss = float(total / count)
        return {"loss": loss, self.metric_name: loss}

    def samples(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Original, masked and reconstructed images; stored images only if `pictures` is set."""
        if self.path != GENERATED and not self.pictures:
            return {}
        patches, mask = targets[:_SHOWN, :, :-1], targets[:_SHOWN, :, -1:]
        mean, std = _standard(self.path, self.size, str(targets.device))

        def to_bytes(rows: Tensor) -> Tensor:
            return ((self.join(rows) * std + mean).clamp(0, 1) * 255).round().byte()

        filled = torch.lerp(patches, outputs[:_SHOWN].float(), mask)
        return {
            "original": to_bytes(patches),
            "masked": to_bytes(patches * (1 - mask)),
            "reconstructed": to_bytes(filled),
        }


def _moved(pixels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each image [h, w, 3] by up to `most` pixels down and across; its border fills the rest."""
    count, size = len(pixels), pixels.shape[1]
    shape, device = (2, count, 1), pixels.device
    by = torch.randint(-most, most + 1, shape, generator=generator, device=device)
    down, across = (torch.arange(size, device=device) - by).clamp(0, size - 1)
    image = torch.arange(count, device=device)[:, None, None]
    return pixels[image, down[:, :, None], across[:, None, :]]


def _seed(draw: Draw) -> int:
    """Held-out draws ignore the run, so that all runs are measured on the same images and masks."""
    return Draw(0, draw.index, draw.stream).seed if draw.held_out else draw.seed


@functools.lru_cache(maxsize=8)
def _standard(path: str, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each colour over the training images, on the device."""
    if path == GENERATED:
        sample = portraits(512, 16, torch.Generator().manual_seed(0)).flatten(0, 2)
        mean, std = sample.mean(0), sample.std(0)
    else:
        data = images.load(path, size)
        mean, std = torch.tensor(data.mean), torch.tensor(data.std)
    return mean.to(device), std.to(device)
