"""Axes without gauge freedom, and tied weights: pressed, priced and cut, and never rescaled."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaugelasso
from gaugelasso import Axis, AxisTable, Compressible, Compressor, CompressorOptions, Cost, Slot
from gaugelasso.compress.flat import tied_names
from gaugelasso.compress.guard import temporarily_zeroed
from gaugelasso.models import SlowNorm, centred
from tests.contract.models import difference
from tests.examples import example

OPTIONS = CompressorOptions(lr=0.02, interval=5, trust=2.0, drop_tolerance=1e9)
TOKENS = torch.arange(12).remainder(7).view(3, 4)


class TiedNet(Compressible):
    """Logits by the table that also embeds: `head.weight` is `embed.weight`, as in many models."""

    def __init__(self, words: int = 7, width: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # Not nn.Linear's own width, which is of the model as it was built.
        return F.linear(F.embedding(tokens, self.embed.weight), self.head.weight)

    def axis_table(self) -> AxisTable:
        table = Slot("embed.weight", 1)
        return AxisTable(
            axes=(Axis("width", "width", (table,), (table,), gauge=False),),
            fixed=(Slot("embed.weight", 0),),
            costs=(Cost("matmul", len(self.embed.weight), ("width",)),),
        )

    def structure(self) -> dict:
        return {"width": self.embed.weight.shape[1]}


class GaugedTiedNet(TiedNet):
    """With a scale for each use, the tied table has a gauge: it is alone on side A."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = (nn.Parameter(torch.ones(6)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed.weight) * self.write
        return F.linear(x * self.read, self.head.weight)

    def axis_table(self) -> AxisTable:
        # The table is used twice, so the scales share its factor: c c / (c c).
        axis = Axis("width", "width", (Slot("embed.weight", 1),), (Slot("write"), Slot("read")))
        table = super().axis_table()
        return AxisTable((axis,), table.fixed, costs=table.costs)


def train(model: Compressible, compressor: Compressor, steps: int) -> None:
    for _ in range(steps):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        compressor.step(loss)


@pytest.mark.parametrize("kind", [TiedNet, GaugedTiedNet])
def test_tied_weights_stay_tied_through_cuts(kind: type[TiedNet]) -> None:
    model = kind()
    compressor = Compressor(model, loss_target=2.5, options=OPTIONS)
    assert model.head.weight is model.embed.weight
    train(model, compressor, 200)
    assert model.head.weight is model.embed.weight
    assert tied_names(model) == {"embed.weight": ["head.weight"]}
    assert compressor.widths["width"] < 6
    assert compressor.resume_state.finite()


@pytest.mark.parametrize("kind", [TiedNet, GaugedTiedNet])
def test_tied_models_pass_the_check(kind: type[TiedNet]) -> None:
    result = gaugelasso.check(kind(), (TOKENS.view(-1), TOKENS.view(-1)))
    assert result.passed, str(result)


def test_an_undone_cut_leaves_tied_weights_tied() -> None:
    model = TiedNet()
    compressor = Compressor(model, loss_target=2.5, options=OPTIONS)
    weight = model.embed.weight
    undo = compressor.state.snapshot_modules()
    with torch.no_grad():
        weight[:, 2] = 0
    compressor.event_()
    assert model.embed.weight.shape == (7, 5)
    undo()
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.shape == (7, 6)


def test_a_balance_leaves_an_axis_without_gauge_alone() -> None:
    model = example("encoder").build()
    compressor = Compressor(model, loss_target=1.0)
    mlp = model.operators["mlp_0"]
    with torch.no_grad():
        mlp.down.mul_(100)  # unequal sides: a balance would change them
        mlp.up_bias.fill_(0.5)
        inputs = example("encoder").batch(4)[0]
        before, bias = model.eval()(inputs), mlp.up_bias.clone()
        compressor.state.balance_(pressing=True)
        assert torch.equal(model.operators["mlp_0"].up_bias, bias)
        assert difference(model(inputs), before) < 1e-4


def test_a_probe_zeroes_both_sides_without_gauge() -> None:
    """cosh(0) = 1: with side A alone at zero, a unit would still write a row of `down`."""

    class Cosh(Compressible):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(2, 3))
            self.down = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.up).cosh() @ self.down

        def axis_table(self) -> AxisTable:
            axis = Axis("j", "j", (Slot("up", 1),), (Slot("down"),), gauge=False)
            return AxisTable((axis,), (Slot("up", 0), Slot("down", 1)))

    model = Cosh()
    tensors = dict(model.named_parameters())
    keep = torch.tensor([True, False, True])
    x = torch.ones(1, 2)
    with temporarily_zeroed(model.axis_table(), tensors, {"j": keep}):
        assert torch.allclose(model(x), 2 * torch.full((1, 2), 2.0).cosh())
    assert torch.allclose(model(x), 3 * torch.full((1, 2), 2.0).cosh())


# --- LayerNorm over a removable stream ------------------------------------------------------


def test_slow_norm_of_a_centred_stream_is_layer_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x = centred(torch.randn(5, 8, generator=generator, dtype=torch.float64))
    norm = SlowNorm(range(8)).double()
    with torch.no_grad():
        norm.gain.copy_(torch.randn(8, generator=generator))
    assert difference(norm(x), F.layer_norm(x, (8,), norm.gain, eps=0.0)) < 1e-12


def test_the_encoder_begins_as_a_network_with_layer_norm() -> None:
    """Every read of the textbook's LayerNorm gives the same output, as every write is centred."""
    module = example("encoder")
    model, (images, _) = module.build().double().eval(), module.batch(4)

    def layer_norm(self: SlowNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.gain, eps=0.0)

    with torch.no_grad():
        before = model(images.double())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlowNorm, "forward", layer_norm)
            assert difference(model(images.double()), before) < 1e-6  # centred in float32


@pytest.mark.parametrize(("seed", "optimizer"), [(0, "muon"), (1, "adam")])
def test_the_encoder_trains_down_to_nothing_without_nan(seed: int, optimizer: str) -> None:
    module = example("encoder")
    torch.manual_seed(seed)
    model = module.Encoder.uniform(width=8, layers=2, d_k=4, hidden=8)
    options = CompressorOptions(lr=0.03, interval=5, optimizer=optimizer)
    compressor = Compressor(model, loss_target=1e6, options=options)
    for step in range(60):
        images, classes = module.batch(8, seed=step)
        loss = module.loss(model(images), classes)
        loss.backward()
        compressor.step(loss)
        assert compressor.resume_state.finite()
    assert compressor.skipped == 0
    assert compressor.fma < 0.2 * compressor.fma_initial
    assert any(event.removed for event in compressor.history)
