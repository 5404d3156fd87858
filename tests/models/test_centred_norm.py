"""The LayerNorm in place: the usual one at first, and what compression makes of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gaugelasso import Compressor, CompressorOptions, Transformer
from gaugelasso.axes import Tensors, named_tensors
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.gauge import SlowNorms
from gaugelasso.compress.reference import follow_
from gaugelasso.inference.folding import Folding
from gaugelasso.inference.norms import Norm
from gaugelasso.models import TransformerSpec
from gaugelasso.models.centred_norm import CentredNorm
from tests.toys import exact

WIDTH = 12


def norm(eps: float = 0.01, by_token: bool = False) -> CentredNorm:
    made = CentredNorm(WIDTH, eps=eps, by_token=by_token).double().eval()
    with torch.no_grad():
        for seed, leaf in enumerate((made.gain, made.bias)):
            leaf.normal_(generator=torch.Generator().manual_seed(seed))
    made.weight.fill_(1 / WIDTH)  # in float64
    with torch.no_grad():
        for leaf in (made.mean, made.spread):
            leaf.fill_(WIDTH**-0.5)
    return made


def stream() -> torch.Tensor:
    x = torch.randn(WIDTH, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return 2 * x + 1.5


@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_at_first_it_is_layer_norm(eps: float) -> None:
    made, x = norm(eps), stream()
    expected = F.layer_norm(x.T, (WIDTH,), made.gain, made.bias, eps).T
    torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)
    for align in (1, 8):
        folding = Folding(torch.arange(WIDTH), torch.float64, align=align)
        served = Norm(made, folding)(F.pad(x.T, (0, -WIDTH % align)))
        torch.testing.assert_close(served[:, :WIDTH], expected.T, rtol=1e-12, atol=1e-12)
        assert not served[:, WIDTH:].any()


def test_tokens_without_signal_get_the_bias_and_no_gradient() -> None:
    made = norm(eps=0.0)
    x = torch.full((WIDTH, 2), 3.0, dtype=torch.float64, requires_grad=True)
    y = made(x)
    assert torch.equal(y, made.bias[:, None].expand(-1, 2))
    y.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_energies_are_those_of_the_centred_channels() -> None:
    x = stream()
    centred = x - x.mean(0)
    for by_token in (False, True):
        made = norm(by_token=by_token).train()
        made(x)
        level = centred.square().mean(0) + 0.01
        expected = centred.square() / (level if by_token else 1)
        torch.testing.assert_close(made.energy, expected.mean(1))


def test_its_weights_do_not_follow() -> None:
    made = norm()
    tensors: Tensors = named_tensors(made)
    declared = replace(made.norm("x"), gain="gain", weight="weight", energy="energy")
    made.energy.uniform_(0.5, 2)
    before = made.weight.clone()
    SlowNorms([declared], tensors).follow_(exact(0.5))
    follow_(declared, tensors, 0.5)
    assert torch.equal(made.weight, before)
    SlowNorms([replace(declared, follows=True)], tensors).follow_(exact(0.5))
    assert not torch.equal(made.weight, before)


def encoder(**also: object) -> Transformer:
    spec = TransformerSpec.uniform(
        width=16, layers=2, heads=2, d_k=8, d_v=8, d_f=24, length=6, inputs=8, outputs=8,
        rope=False, causal=False, positions=True,
    )  # fmt: skip
    return Transformer(replace(spec, post_norm=True, mlp="gelu", write_bias=True, **also))  # type: ignore[arg-type]


def test_a_site_that_nobody_reads_stays_while_normalisers_do() -> None:
    """It counts in their levels: only its own removal, after what is written fades, is exact."""
    model = encoder()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    for name, keep in keeps.items():
        if name.endswith((".d_ai", ".d_mi", ".d_c")):
            keep[5] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    assert decision.keeps["D"].all()
    assert decision.keeps["embedding.d_e"].all()
    keeps["D"][5] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    assert decision.dropped()["D"] == 1
    assert not decision.keeps["embedding.d_e"][5]


def test_a_normaliser_stays_after_its_operator_is_gone() -> None:
    model = encoder().double().eval()
    tokens = torch.arange(12).view(2, 6) % 8
    attention = model.operators["attention_1"]
    with torch.no_grad():
        for leaf in attention.parameters():
            leaf.zero_()
        before = model(tokens)
        model.remove_operator("operators.attention_1")
        torch.testing.assert_close(model(tokens), before)
    assert [*model.norms] == ["embedding", "attention_0", "mlp_0", "attention_1", "mlp_1"]
    again = Transformer.from_structure(model.structure()).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens), model(tokens))


def test_a_fresh_encoder_learns_and_loses_sites_under_pressure() -> None:
    """Reversing sequences, to a loss of 0.3."""
    model = encoder()
    options = CompressorOptions(lr=0.02, interval=5, loss_smoothing=0.9)
    compressor = Compressor(model, loss_target=0.3, options=options)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(200):
        inputs = torch.randint(8, (16, 6), generator=generator)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flip(1).flatten())
        loss.backward()
        compressor.step(loss)
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.5
    assert compressor.fma < 0.5 * compressor.fma_initial
    assert compressor.widths["D"] < 16
