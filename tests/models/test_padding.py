"""Sequences of unequal lengths in one batch: padding changes neither outputs nor gradients."""

import pytest
import torch

from gaugelasso import Compressor, CompressorOptions, Transformer, TransformerSpec

LENGTHS = torch.tensor([5, 2, 7])
SIZES = {"width": 16, "layers": 2, "heads": 2, "d_k": 6, "d_v": 4, "d_f": 20, "length": 7}


def encoder(causal: bool = False) -> Transformer:
    torch.manual_seed(0)
    spec = TransformerSpec.uniform(**SIZES, inputs=11, outputs=3, causal=causal)
    return Transformer(spec).double()


def padded(value: int) -> torch.Tensor:
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    return torch.where(torch.arange(7) < LENGTHS[:, None], tokens, value)


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_are_those_of_each_sequence_alone(causal: bool) -> None:
    model = encoder(causal).eval()
    tokens = padded(0)
    together = model(tokens, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model(tokens[row : row + 1, :length])[0]
        assert torch.allclose(together[row, :length], alone, atol=1e-12)
    real = torch.arange(7) < LENGTHS[:, None]
    assert torch.equal(model(padded(9), LENGTHS)[real], together[real])
    assert causal or not torch.allclose(model(tokens)[real], together[real])


def test_gradients_do_not_depend_on_the_padding() -> None:
    real = torch.arange(7) < LENGTHS[:, None]
    found = []
    for value in (0, 9):
        model = encoder()
        model(padded(value), LENGTHS)[real].square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, atol=1e-12)


def test_a_padded_loop_compresses() -> None:
    """The answer at each real position is its token modulo three."""
    model = encoder().float()
    generator = torch.Generator().manual_seed(2)
    options = CompressorOptions(lr=0.01, interval=10)
    compressor = Compressor(model, 0.5, options)
    before = compressor.fma
    for _ in range(200):
        lengths = torch.randint(1, 8, (16,), generator=generator)
        tokens = torch.randint(11, (16, 7), generator=generator)
        real = torch.arange(7) < lengths[:, None]

        def loss(tokens=tokens, lengths=lengths, real=real) -> torch.Tensor:
            logits = model(tokens, lengths)[real]
            return torch.nn.functional.cross_entropy(logits, tokens[real] % 3)

        compressor.step(loss)
    assert compressor.fma < 0.9 * before
    assert float(loss().detach()) < 1.0


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_another_batch_are_refused(causal: bool) -> None:
    with pytest.raises(ValueError, match=r"lengths \[2\]: one for each of 3 sequences"):
        encoder(causal)(padded(0), LENGTHS[:2])
