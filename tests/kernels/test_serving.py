"""The kernels of inference against their references: alone, and in whole models.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gaugelasso.inference import (
    Form,
    InferenceModel,
    folding,
    heads,
    noise,
    operators,
    stream,
    tied,
    timed_parts,
)
from gaugelasso.inference.attention import attend
from gaugelasso.inference.cache import Cache
from gaugelasso.inference.folding import StreamOrder
from gaugelasso.inference.stream import ReadForm
from gaugelasso.kernels.stream import EPS
from gaugelasso.kernels.tiles import DECODING, Tile, candidates
from gaugelasso.models import Transformer, TransformerSpec
from tests.contract.models import Case, make
from tests.inference.cases import CASES
from tests.inference.test_model import deviation, inputs_of
from tests.kernels import DEVICE
from tests.kernels.comparison import draw, draw_indices, draw_sites

pytest.importorskip("triton")

from gaugelasso.kernels.gpu import decoding, ends, mixing, products, whole

# Inputs, columns and tokens: of one block and of several, whole and not.
SIZES = [(1, 1, 1), (5, 7, 3), (70, 40, 33), (20, 140, 530)]


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream, operators, heads, folding, tied):
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: True)


def a_stream(tokens: int, size: int, order: str) -> Tensor:
    x = draw(tokens, size)
    x[0] = 0  # a token without signal
    return x if order == "tokens" else x.T.contiguous().T


READS: list[ReadForm] = ["fused", "scaled", "fused_window", "scaled_window", "staged",
                         "staged_gated"]  # fmt: skip


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("form", READS)
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize(("d", "c", "tokens"), SIZES)
def test_a_read_and_its_product(
    d: int, c: int, tokens: int, dense: bool, form: ReadForm, order: str
) -> None:
    x = a_stream(tokens, 112, order)
    sites = torch.arange(16, 16 + d) if dense else draw_sites(d + 9, d).sort().values.cpu()
    weight, maps = draw(d, positive=True).cpu(), draw(d, 2 * c).cpu()
    plain = stream.Read(sites, weight, maps, "gather").to(DEVICE)
    paired = form == "staged_gated"
    fast = stream.Read(sites, weight, maps, form, align=16, paired=paired).to(DEVICE)
    for gated in (True,) if paired else (False, True):
        expected = plain._plain(x)
        if gated:
            expected = torch.nn.functional.silu(expected[:, c:]) * expected[:, :c]
        tiles = candidates(tokens, c, gated and not paired)[:2]
        for tile in (None, *tiles[: 2 if tokens < 100 else 0]):
            got = fast(x, gated, tile)
            assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()) + 1e-12)
            assert (got[0] == 0).all()


@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize("dense", [False, True], ids=["scattered", "dense"])
@pytest.mark.parametrize(("f", "d", "tokens"), SIZES)
def test_a_product_and_its_write(f: int, d: int, tokens: int, dense: bool, order: str) -> None:
    x = a_stream(tokens, d + 9, order)
    sites = torch.arange(4, 4 + d).to(DEVICE) if dense else draw_sites(d + 9, d).sort().values
    h, maps = draw(tokens, f), draw(f, d)
    expected = stream.Write(sites, maps, d + 9, "scatter")(x.clone(), h)
    # As stored: rows as long as the hardware likes.
    wide = stream.padded(maps.T, 16).T.contiguous()
    got = products.product_write_(x, h, wide, sites, first=4 if dense else None)
    assert got is x
    assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()))


def test_gates_that_are_far_from_zero() -> None:
    gate = torch.tensor([-80.0, -30, -1e-6, 0, 1e-6, 30, 80], device=DEVICE)[:, None]
    up = draw(7, 40)
    expected = up * torch.nn.functional.silu(gate)
    got = products.swiglu(torch.cat([up, gate.expand(-1, 40)], 1))
    assert torch.allclose(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("by_channel", [True, False], ids=["channels", "tokens"])
@pytest.mark.parametrize("turned", [True, False], ids=["rope", "plain"])
@pytest.mark.parametrize(("d_k", "d_v"), [(2, 1), (6, 5), (24, 40)])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("tile", [None, Tile(16, 64, 0, 4, 2)], ids=["heads", "groups"])
def test_one_token_over_a_cache(
    heads: int, groups: int, d_k: int, d_v: int, turned: bool, by_channel: bool, tile: Tile | None
) -> None:
    """The new token is rotated, stored, and attends to itself and to all before it."""
    batch, length, d_k = 3, 150, d_k if turned else d_k + 1
    positions = torch.tensor([0, 149, 130], device=DEVICE)
    half = d_k // 2 if turned else d_k
    second = -(-half // 8) * 8 if turned else half
    wide_k, wide_v = -(-2 * second // 8) * 8, -(-d_v // 8) * 8
    q, k = draw(batch, heads, d_k), draw(batch, groups, d_k, seed=2)
    v = draw(batch, groups, d_v, seed=3)
    angles = None
    turned_q, turned_k = q, k
    if turned:
        angle = torch.arange(length, device=DEVICE)[:, None] * draw(half, positive=True)
        angles = (pad(angle.cos(), second), pad(angle.sin(), second))
        turned_q, turned_k = (rotated(each, angle[positions][:, None]) for each in (q, k))
    rows = torch.cat(
        [split(q, half, second, wide_k), split(k, half, second, wide_k), pad(v, wide_v).flatten(1)],
        dim=1,
    )
    cache = Cache([(groups, d_k, d_v)], batch, length, q.dtype, q.device, by_channel)
    [keys], [values] = cache.keys, cache.values
    keys.copy_(draw(*keys.shape))
    values.copy_(draw(*values.shape, seed=1))
    length = keys.shape[2]
    for row, position in enumerate(positions.tolist()):  # what lies there and beyond is not read
        keys[row, :, position:], values[row, :, position:] = torch.nan, torch.nan
    got = decoding.attend_one(
        rows, keys, values, positions, heads, (wide_k, wide_v), second, angles, tile
    )
    at = torch.arange(batch, device=DEVICE)
    assert torch.allclose(keys[at, :, positions], turned_k, atol=1e-5)
    assert torch.equal(values[at, :, positions], v)
    mask = (torch.arange(length, device=DEVICE) <= positions[:, None])[:, None, None]
    expected = attend(turned_q[:, :, None], keys.nan_to_num(), values.nan_to_num(), mask=mask)
    got = got.view(batch, heads, 1, wide_v)
    assert torch.allclose(got[..., :d_v], expected, atol=1e-5)
    assert (got[..., d_v:] == 0).all()


def pad(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def split(x: Tensor, half: int, second: int, wide: int) -> Tensor:
    """Heads [B, H, d] as they lie in a row, with the halves apart: [B, H wide]."""
    return pad(torch.cat([pad(x[..., :half], second), x[..., half:]], -1), wide).flatten(1)


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("turned", [True, False], ids=["rope", "plain"])
@pytest.mark.parametrize(
    ("size", "heads", "groups", "half", "d_v"),
    [(64, 1, 1, 3, 8), (64, 2, 1, 8, 16), (70, 1, 1, 8, 16), (70, 4, 2, 20, 40)],
)
def test_attention_on_rows(
    size: int, heads: int, groups: int, half: int, d_v: int, turned: bool, causal: bool
) -> None:
    """Of sequences that are whole blocks or not: rotated while read, in place, and not at all.

    Values of 16 channels fill their block, and those of 8 and 40 leave a column for the weights.
    """
    batch = 2
    tokens, second = batch * size, -(-half // 8) * 8
    wide = (2 * second, d_v)
    q, k = (pad(draw(tokens, n, half), second) for n in (2 * heads, 2 * groups))
    v = draw(tokens, groups, d_v, seed=5)
    angle = torch.arange(size, device=DEVICE)[:, None] * pad(draw(half, positive=True), second)
    angles = (angle.cos(), angle.sin()) if turned else None
    rows = torch.cat([each.flatten(1) for each in (q, k, v)], 1)
    heads_of = [
        each.reshape(batch, size, n, -1).transpose(1, 2)
        for each, n in ((q, heads), (k, groups), (v, groups))
    ]
    if turned:
        heads_of[:2] = [rotated(each, angle) for each in heads_of[:2]]
    expected = attend(*heads_of, causal=causal).transpose(1, 2).reshape(tokens, -1)
    counts = (heads, groups)
    for tile in (None, Tile(32, 16, 0), Tile(16, 32, 0)):
        got = mixing.attend_rows(rows, batch, counts, wide, angles, causal, tile)
        assert torch.allclose(got, expected, atol=1e-5)
    mixing.rotate_heads_(rows, batch, counts, (2 * second, d_v), wide, second, angles)
    got = mixing.attend_rows(rows, batch, counts, wide, None, causal)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("order", ["tokens", "sites"])
@pytest.mark.parametrize(
    ("d", "f", "w", "tokens"), [(3, 16, 1, 1), (70, 144, 90, 19), (5, 80, 20, 256)]
)
def test_an_mlp_in_one_kernel(d: int, f: int, w: int, tokens: int, order: str) -> None:
    """Twice: the counters are zero again."""
    x = a_stream(tokens, 100, order)
    sites, targets = draw_sites(100, d).sort().values, draw_sites(100, w).sort().values
    weight, maps, down = draw(d, positive=True), draw(d, 2 * f), draw(f, w)
    read = stream.Read(sites, weight, maps, "gather")
    write = stream.Write(targets, down, 100, "scatter")
    counters = folding.counters().to(DEVICE)
    wide = stream.padded(down.T, 16).T.contiguous()
    expected = x.clone()
    for _ in range(2):
        up, gate = read._plain(expected).chunk(2, 1)
        expected = write(expected, torch.nn.functional.silu(gate) * up)
        got = whole.mlp_(x, (sites, weight, maps), (wide, targets), counters, EPS)
        assert got is x
        assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()))
        assert (counters == 0).all()


@pytest.mark.parametrize("by_site", [False, True], ids=["tokens", "sites"])
@pytest.mark.parametrize(("batch", "size"), [(1, 1), (3, 50)])
def test_tokens_become_the_stream(batch: int, size: int, by_site: bool) -> None:
    tokens, table = draw_indices(9, batch * size).view(batch, size), draw(9, 70)
    at = torch.arange(batch * size, device=DEVICE).view(batch, size) % 60
    for places in (None, draw(60, 70, seed=1)):
        for where in (None, at):
            got = ends.embed(tokens, table, places, where, by_site)
            expected = table[tokens]
            if places is not None:
                expected = expected + (places[:size] if where is None else places[where])
            assert torch.equal(got, expected.flatten(0, 1))
            assert got.is_contiguous() != by_site or got.shape[0] == 1


@pytest.mark.parametrize("placed", [False, True])
def test_tokens_and_positions_without_a_row_give_nan(placed: bool) -> None:
    """A GPU checks no values, and an address far outside would end all work on it."""
    tokens = torch.tensor([[8, 9, -1, 2**40, 0, 0]], device=DEVICE)
    at = torch.tensor([[0, 0, 0, 0, 5, -(2**40)]], device=DEVICE)
    places, where = (draw(5, 70, seed=1), at) if placed else (None, None)
    got = ends.embed(tokens, draw(9, 70), places, where, False).isnan()
    assert got.all(1).tolist() == got.any(1).tolist() == [False, True, True, True, placed, placed]


def test_drawn_tokens_are_noted_as_by_the_reference() -> None:
    batch, block = 5, 4
    stops = torch.tensor([False, True, False], device=DEVICE)
    state = {
        "drawn": torch.zeros(batch, dtype=torch.long, device=DEVICE),
        "stopped": torch.tensor([False, True, False, False, False], device=DEVICE),
        "out": torch.zeros(batch, block, dtype=torch.long, device=DEVICE),
        "at": torch.tensor([2], device=DEVICE),
        "counts": torch.arange(batch, device=DEVICE),
    }
    new = torch.tensor([2, 0, 1, 0, 2], device=DEVICE)
    ends.note_drawn_(new, stops=stops, nothing=-1, **state)
    assert state["out"][:, 2].tolist() == [2, -1, 1, 0, 2]
    assert (state["out"][:, [0, 1, 3]] == 0).all()
    assert torch.equal(state["drawn"], new)
    assert state["stopped"].tolist() == [False, True, True, False, False]
    assert state["counts"].tolist() == [1, 2, 3, 4, 5]
    assert state["at"].tolist() == [3]


def test_noise_is_that_of_the_reference() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, -(2**63), -5], device=DEVICE)
    counts = torch.tensor([0, 1, 2, 10**6, 2**40], device=DEVICE)
    expected, got = torch.empty(5, 300), torch.empty(5, 300, device=DEVICE)
    noise.exponential_(expected, seeds.cpu(), counts.cpu())
    decoding.exponential_(got, seeds, counts)
    assert torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert (got > 0).all()


NAMES = {"biases", "gpt2", "grouped_keys", "no_rope", "write_biases"}
SERVED = [case for case in CASES if case.dropped and case.seed == 0 and case.row.name in NAMES]


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("kind", ["sdpa", "narrow", "direct", "groups", "whole"])
@pytest.mark.parametrize("case", SERVED, ids=str)
@torch.inference_mode()
def test_whole_models(case: Case, kind: str) -> None:
    model = make(case).float().to(DEVICE)
    inputs = inputs_of(case, model).to(DEVICE)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    form = {
        "sdpa": Form("staged", "fused", "sdpa"),
        "narrow": Form("fused", "fused", "narrow"),
        "direct": Form("scaled_window", "fused", "direct"),
        "groups": Form("staged_gated", "fused", "direct", attention_tile=DECODING[0]),
        "whole": Form("fused", "fused", "narrow", step="whole"),
    }[kind]
    order: StreamOrder = "sites" if kind == "narrow" else "tokens"
    served = InferenceModel(model, forms=form, align=16, stream=order)
    whole = model(inputs)
    assert deviation(served(inputs), whole) < 1e-4
    if not served.generates:
        return
    cache = served.new_cache(3)
    if kind in ("direct", "groups"):  # as on a GPU
        cache = Cache(served.cache_widths(), 3, cache.length, served.dtype, served.device, True)
    lengths = torch.tensor([2, 1], device=DEVICE)
    rows = torch.tensor([2, 0], device=DEVICE)
    logits = served.prefill(inputs[:, :3], cache, lengths, rows=rows)
    at = torch.arange(2, device=DEVICE)
    assert deviation(logits, whole[at, lengths - 1]) < 1e-4
    tokens = draw_indices(served.spec.inputs, 3)
    tokens[rows] = inputs[at, lengths]
    logits = served.decode(tokens, cache)[rows]
    assert deviation(logits, whole[at, lengths]) < 1e-4


@pytest.mark.usefixtures("with_kernels")
@torch.inference_mode()
def test_many_sequences_of_one_kernel_per_operator() -> None:
    """Every sequence has a counter, and more than there are take the kernels of the parts."""
    sizes = {"width": 12, "heads": 1, "d_k": 4, "d_v": 4, "d_f": 20}
    spec = TransformerSpec.uniform(layers=1, length=2, inputs=9, outputs=9, rope=True, **sizes)
    model = Transformer(spec).eval().to(DEVICE)
    form = Form("fused", "fused", "narrow", step="whole")
    served = InferenceModel(model, forms=form, align=16)
    tokens = draw_indices(9, 130, 1)
    logits = served.decode(tokens[:, 0], served.new_cache(130))
    assert deviation(logits, model(tokens)[:, 0]) < 1e-4
    assert len(folding.counters()) == folding.WHOLE
    for batch in (130, folding.WHOLE, folding.WHOLE + 1):
        assert folding.in_one_kernel(form, draw(batch, 1)) == (batch <= folding.WHOLE)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("order", ["tokens", "sites"])
@torch.inference_mode()
def test_tuning_has_every_form_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, order: StreamOrder, phase: str
) -> None:
    """All of them run, and the last ones, which are taken here, compute the trained model."""
    case = next(case for case in SERVED if case.row.name == "grouped_keys")
    model = make(case).float().to(DEVICE)
    inputs = inputs_of(case, model).to(DEVICE)

    length = inputs.shape[1] if phase == "prefill" else 1

    def judge(_: str, actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        return {name: -float(number) for number, name in enumerate(actions)}

    monkeypatch.setattr(timed_parts, "times_on", judge)
    parts = timed_parts.Parts(model, torch.float32, False, 2, length, 1, order)
    parts.gpu = parts.kernels = True
    parts.plain = InferenceModel(model, forms=Form(), stream=order, align=16)
    forms, _, timings = parts.choose()
    known = {label.partition(" ")[0] for times in timings.values() for label in times["read"]}
    windows = {"fused_window"} if order == "tokens" else set()
    assert known == {"fused", "staged"} | windows
    assert ("step" in timings["mlp_0"]) == ("step" in timings["attention_0"]) == (length == 1)
    attention = {label.partition(" ")[0] for label in timings["attention_0"]["attention"]}
    assert attention == ({"sdpa", "cudnn", "narrow", "direct"} if length > 1 else {"narrow"})
    assert (forms["mlp_0"].write_tile is not None) == (length > 1)
    assert (forms["attention_0"].step == "whole") == (length == 1)
    served = InferenceModel(model, forms=forms, stream=order, align=16)
    assert deviation(served(inputs), model(inputs)) < 1e-4
