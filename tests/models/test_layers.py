"""The network against textbook formulas."""

import math

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import Norm, named_tensors
from gaugelasso.compress.gauge import SlowNorms
from gaugelasso.compress.reference import anchor_
from gaugelasso.compress.surgery import cut_
from gaugelasso.kernels.stream import EPS
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.layers import Extractor
from gaugelasso.models.residual import SlowNorm
from tests.contract.models import difference, silence_, transformer_inputs
from tests.toys import exact, gaussian

BASE = {
    "width": 8,
    "layers": 2,
    "heads": 4,
    "d_k": 6,
    "d_v": 5,
    "d_f": 7,
    "length": 6,
    "inputs": 9,
    "outputs": 5,
}
KINDS = {
    "rope": {},
    "positions": {"positions": True},
    "grouped keys": {"kv_heads": 2},
    "full": {"causal": False},
    "no rope": {"rope": False},
    "patches": {"input_kind": "patches", "rope": False, "causal": False, "positions": True},
    "tied": {"norm": "tied"},
}


def build(**settings: object) -> Transformer:
    """An initial model in float64, with unrounded constants, whose vectors are not all ones."""
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(TransformerSpec.uniform(**(BASE | settings))).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for seed, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.data.copy_(1 + 0.3 * gaussian(len(parameter), seed=seed))
    return model


def inputs_for(model: Transformer) -> Tensor:
    return transformer_inputs(model, torch.Generator().manual_seed(1))


@torch.no_grad()
def textbook(model: Transformer, inputs: Tensor) -> Tensor:
    """RMSNorm, RoPE by rotated halves, softmax attention head by head, SwiGLU; [B, S, D]."""
    spec, weights = model.initial_spec, dict(model.named_parameters())
    length = inputs.shape[1]

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        if spec.norm == "tied":
            # The paper's prescaled RMS: weights gamma^2 / |gamma|^2.
            square = ((gain * x) ** 2).sum(-1, keepdim=True) / gain.square().sum()
        else:
            square = (x**2).mean(-1, keepdim=True)
        return gain * x / (square + EPS).sqrt()

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 10_000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
        rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * angle.cos() + rotated * angle.sin()

    def attention(x: Tensor, name: str) -> Tensor:
        y = norm(x, weights[f"{name}.read.gain"])
        query, key, value, out = (weights[f"{name}.{w}"] for w in ("query", "key", "value", "out"))
        total = torch.zeros_like(x)
        for head in range(query.shape[1]):
            group = head * key.shape[1] // query.shape[1]
            q = y @ query[:, head].flatten(1)
            k = y @ key[:, group].flatten(1)
            if model.operators["attention_0"].rope:
                q, k = rotate(q), rotate(k)
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if spec.causal:
                future = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(future, -math.inf)
            total += scores.softmax(-1) @ (y @ value[:, group]) @ out[head]
        return total * weights[f"{name}.write.scale"]

    def mlp(x: Tensor, name: str) -> Tensor:
        y = norm(x, weights[f"{name}.read.gain"])
        gate = y @ weights[f"{name}.gate"]
        hidden = (y @ weights[f"{name}.up"]) * gate * torch.sigmoid(gate)
        return hidden @ weights[f"{name}.down"] * weights[f"{name}.write.scale"]

    table = weights["embedding.table"]
    x = table[inputs] if spec.input_kind == "tokens" else inputs @ table
    if spec.positions:
        x = x + weights["embedding.positions"]
    x = x * weights["embedding.write.scale"]
    for depth in range(spec.layers):
        x = x + attention(x, f"operators.attention_{depth}")
        x = x + mlp(x, f"operators.mlp_{depth}")
    return norm(x, weights["classifier.read.gain"]) @ weights["classifier.out"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_initial_model_is_the_textbook_transformer(kind: str) -> None:
    model = build(**KINDS[kind])
    inputs = inputs_for(model)
    with torch.no_grad():
        assert difference(model(inputs), textbook(model, inputs)) < 1e-10


def test_shorter_sequences_are_prefixes() -> None:
    model = build(positions=True)
    tokens = inputs_for(model)
    with torch.no_grad():
        assert difference(model(tokens[:, :3]), model(tokens)[:, :3]) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_the_past_sees_the_future_only_without_a_mask(causal: bool) -> None:
    model = build(causal=causal)
    tokens = inputs_for(model)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % BASE["inputs"]
    with torch.no_grad():
        before, after = model(tokens), model(other)
    assert (difference(after[:, :-1], before[:, :-1]) < 1e-12) == causal
    assert difference(after[:, -1], before[:, -1]) > 1e-3


def test_sequences_of_a_batch_do_not_mix() -> None:
    model = build()
    tokens = inputs_for(model)
    with torch.no_grad():
        assert difference(model(tokens[:1]), model(tokens)[:1]) < 1e-12


@pytest.mark.parametrize("rope", [True, False])
def test_a_narrower_head_is_not_sharper(rope: bool) -> None:
    """The softmax scale and the frequencies stay the initial ones when d_k shrinks."""
    model = build(rope=rope)
    tokens = inputs_for(model)
    name = "operators.attention_0.d_k"
    keep = torch.ones(model.axis_table().widths(named_tensors(model))[name], dtype=torch.bool)
    keep[0] = False
    silence_(model, {name: keep})
    expected = textbook(model, tokens)
    cut_(model, model.axis_table(), {name: keep})
    again = Transformer(TransformerSpec.from_dict(model.structure())).double().eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert difference(model(tokens), expected) < 1e-10
        assert difference(again(tokens), expected) < 1e-10


NORM = Norm("gain", "weight", "energy")


def extractor(tied: bool = False, eps: float = 0.0) -> Extractor:
    read = Extractor((3, 0, 4), tied=tied, eps=eps).double()
    read.gain.data.copy_(torch.tensor([0.5, -2.0, 1.5]))
    read.weight.copy_(torch.tensor([0.1, 0.7, 0.3]))
    return read


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_extractor_reads_its_sites(tied: bool, eps: float) -> None:
    read, x = extractor(tied, eps), gaussian(5, 7, seed=2)
    picked, gain = x[[3, 0, 4]], read.gain.detach()[:, None]
    weight = gain**2 / (gain**2).sum() if tied else read.weight[:, None]
    expected = gain * picked / ((weight * picked**2).sum(0) + eps).sqrt()
    stream, normalised = read(x)
    assert torch.equal(stream, x)
    assert torch.allclose(gain * normalised, expected, rtol=1e-12)


def test_energy_is_taken_in_training_only() -> None:
    read, x = extractor(), gaussian(5, 7, seed=2)
    read.eval()(x)
    assert read.energy.tolist() == [1, 1, 1]
    read.train()(x)
    assert torch.allclose(read.energy, x[[3, 0, 4]].square().mean(1))


def test_energy_by_token_counts_every_token_alike() -> None:
    """Where one token is huge, mean squares are those of that token alone."""
    read, x = (
        Extractor((3, 0, 4), tied=False, eps=0.3, by_token=True).double(),
        gaussian(5, 7, seed=2),
    )
    x[:, 2] *= 1000
    _, normalised = read(x)
    assert torch.allclose(read.energy, normalised.detach().square().mean(1))
    expected = x[[3, 0, 4]].square() / (x[[3, 0, 4]].square().mean(0) + 0.3)
    assert torch.allclose(read.energy, expected.mean(1))
    assert read.norms("here")[0].by_token


def test_following_by_token_keeps_the_mean_ratio_of_the_normaliser() -> None:
    read, x = Extractor((3, 0, 4), tied=False, by_token=True).double(), gaussian(5, 7, seed=2)
    read.gain.data.copy_(torch.tensor([0.5, -2.0, 1.5]))
    x[:, 2] *= 1000

    def level() -> torch.Tensor:
        return (read.weight[:, None] * x[[3, 0, 4]].square()).sum(0)

    read(x)
    before = level()
    SlowNorms([NORM], named_tensors(read)).follow_(exact(0.5))
    ratio = level() / before
    assert float(ratio.mean()) == pytest.approx(1, rel=1e-12)
    assert float(ratio.std()) > 0.01


def test_slow_norm_takes_the_same_energies() -> None:
    x = gaussian(5, 7, seed=2)
    x[:, 2] *= 1000
    for by_token in (False, True):
        read = Extractor((3, 0, 4), tied=False, by_token=by_token).double()
        own = SlowNorm((3, 0, 4), by_token=by_token).double()
        read(x)
        own(x.T.view(1, 7, 5))
        assert torch.allclose(own.energy, read.energy)
        assert own.norm("here").by_token is by_token


def test_following_the_gain_keeps_the_mean_normaliser() -> None:
    model = build().train()
    tokens = inputs_for(model)
    model(tokens)
    tensors, norms = named_tensors(model), model.axis_table().norms
    before, weights = levels(model), [tensors[n.weight].clone() for n in norms]
    SlowNorms(norms, tensors).follow_(exact(0.2))
    assert levels(model) == pytest.approx(before, rel=1e-12)
    for norm, old in zip(norms, weights, strict=True):
        assert not torch.allclose(tensors[norm.weight], old)


def test_slow_weights_end_as_the_gain_s_squares() -> None:
    read = extractor()
    SlowNorms([NORM], named_tensors(read)).follow_(exact(1.0))
    share = read.weight / read.weight.sum()
    assert torch.allclose(share, read.gain.detach() ** 2 / (read.gain.detach() ** 2).sum())


def test_a_dead_channel_leaves_its_normaliser_smoothly() -> None:
    read = extractor()
    read.gain.data[1] = 0
    tensors = named_tensors(read)
    shares = []
    for _ in range(3):
        SlowNorms([NORM], tensors).follow_(exact(0.2))
        shares.append(read.weight[1].item())
    assert shares == pytest.approx([0.7 * 0.8, 0.7 * 0.8**2, 0.7 * 0.8**3])


def test_without_gain_the_slow_weights_stay() -> None:
    read = extractor()
    read.gain.data.zero_()
    SlowNorms([NORM], named_tensors(read)).follow_(exact(0.2))
    assert read.weight.tolist() == pytest.approx([0.1, 0.7, 0.3])


def anchored(
    model: Transformer, share: float, rounded: bool = False, least: float = 0.0
) -> dict[str, Tensor]:
    """Anchor every normaliser; returns the gradient, carried over as momentum is."""
    task(model).backward()
    momentum = {name: p.grad.clone() for name, p in model.named_parameters()}
    second = {name: gradient.square() for name, gradient in momentum.items()}
    for norm in model.axis_table().norms:
        anchor_(norm, named_tensors(model), momentum, second, share, rounded, least)
    model.zero_grad()
    for name, gradient in momentum.items():
        assert torch.allclose(second[name], gradient.square())
    return momentum


def levels(model: Transformer) -> list[float]:
    """The mean of each normaliser's square."""
    tensors = named_tensors(model)
    return [
        float((tensors[norm.weight] * tensors[norm.energy]).sum())
        for norm in model.axis_table().norms
    ]


def task(model: Transformer) -> Tensor:
    return model(inputs_for(model)).square().mean()


def test_anchoring_sets_the_level_to_a_share_of_typical_energy() -> None:
    """Typical: the geometric mean, with each input weighted by its contribution.

    By powers of two to within a factor of two.
    """
    model = build().train()
    task(model)
    tensors = named_tensors(model)
    typical = []
    for norm in model.axis_table().norms:
        gain, energy = tensors[norm.gain].detach(), tensors[norm.energy]
        part = gain.square() * energy
        typical.append(float(((part * energy.log()).sum() / part.sum()).exp()))
    for rounded, within in ((True, 2.0), (False, 1 + 1e-6)):
        anchored(model, 0.25, rounded)
        for level, aim in zip(levels(model), typical, strict=True):
            assert 1 / within <= level / (0.25 * aim) <= within


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("least", [0.25, 1.0])
def test_a_level_falls_by_a_bounded_factor(least: float, rounded: bool) -> None:
    """It may rise by any factor."""
    model = build().train()
    task(model)
    before = levels(model)
    anchored(model, 1e-4, rounded, least)
    assert levels(model) == pytest.approx([least * level for level in before])
    anchored(model, 1e4, rounded, least)
    assert all(now > 100 * level for now, level in zip(levels(model), before, strict=True))


def test_a_larger_stream_does_not_change_an_anchored_gain() -> None:
    """A common factor of all writers changes the level, not the gain."""
    model = build().train()
    task(model)
    anchored(model, 0.25)
    tensors, norms = named_tensors(model), model.axis_table().norms
    gains = {norm.gain: tensors[norm.gain].detach().clone() for norm in norms}
    momentum = {name: torch.ones_like(gain) for name, gain in gains.items()}
    for norm in norms:
        tensors[norm.energy].mul_(9.0)
        anchor_(norm, tensors, momentum, {}, 0.25)
        assert torch.allclose(tensors[norm.gain].detach(), gains[norm.gain])


def test_anchoring_changes_nothing_but_the_weight_of_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaugelasso.kernels.stream.EPS", 0.0)
    model = build().train()
    before = model(inputs_for(model))
    momentum = anchored(model, 0.1)
    assert difference(model(inputs_for(model)), before) < 1e-10
    task(model).backward()
    for name, parameter in model.named_parameters():
        assert difference(momentum[name], parameter.grad) < 1e-9, name


def test_a_token_without_signal_has_no_gradient() -> None:
    """It stays zero through many layers, and nothing overflows."""
    spec = TransformerSpec.uniform(
        width=8, layers=4, heads=2, d_k=4, d_v=4, d_f=8, length=3, inputs=5, outputs=4,
        input_kind="patches", causal=False,
    )  # fmt: skip
    model = Transformer(spec)
    patches = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    patches[:, 0] = 0
    model(patches).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_hidden_patch_is_embedded_as_the_token_alone() -> None:
    model = build(input_kind="masked_patches", rope=False, causal=False, positions=True)
    embedding = model.embedding
    hidden = torch.zeros(1, BASE["length"], BASE["inputs"] + 1, dtype=torch.float64)
    hidden[..., -1] = 1
    expected = embedding.write.scale * (embedding.table[-1] + embedding.positions)
    assert difference(embedding(hidden, len(model.sites)), expected.T) < 1e-12
