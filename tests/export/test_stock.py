"""Which models are stock Llamas: refusals that name the operator, and the settings of RoPE."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export
from gaugelasso.export.rope import fitted
from gaugelasso.importing.rope import Bands, Rope
from gaugelasso.models import Transformer
from tests.export.sources import stock, tiny, write_run


def changed(name: str, change: Callable[[Any], None]) -> Transformer:
    """A stock model with one operator changed."""
    model = stock()
    with torch.no_grad():
        change(model.operators[name] if name in model.operators else model.get_submodule(name))
    return model


def fewer_filters(mlp: Any) -> None:
    for leaf in ("up", "gate"):
        setattr(mlp, leaf, torch.nn.Parameter(getattr(mlp, leaf)[:, :7]))
    mlp.down = torch.nn.Parameter(mlp.down[:7])


def fewer_inputs(mlp: Any) -> None:
    mlp.read.gain = torch.nn.Parameter(mlp.read.gain[1:])
    for leaf in ("sites", "weight", "energy"):
        setattr(mlp.read, leaf, getattr(mlp.read, leaf)[1:])
    for leaf in ("up", "gate"):
        setattr(mlp, leaf, torch.nn.Parameter(getattr(mlp, leaf)[1:]))


def fewer_values(attention: Any) -> None:
    attention.value = torch.nn.Parameter(attention.value[..., :5])
    attention.out = torch.nn.Parameter(attention.out[:, :5])


def fewer_columns(embedding: Any) -> None:
    embedding.table = torch.nn.Parameter(embedding.table[:, :-1])
    embedding.write.scale = torch.nn.Parameter(embedding.write.scale[:-1])
    embedding.write.sites = embedding.write.sites[:-1]


def without(name: str) -> Transformer:
    model = stock()
    model.remove_operator(name)
    return model


def with_eps() -> Transformer:
    model = stock(eps=0.1)
    model.get_submodule("operators.mlp_2.read").weight.mul_(2)
    return model


CUT: dict[str, Callable[[], Transformer]] = {
    "operators.mlp_2 has 7 filters, operators.mlp_0 11": lambda: changed("mlp_2", fewer_filters),
    "operators.attention_2 has 5 value channels, operators.attention_0 6": lambda: changed(
        "attention_2", fewer_values
    ),
    "operators.attention_0 has 6 key and 4 value channels in a head": lambda: stock(d_v=4),
    "operators.mlp_0 reads 17 of 18 sites": lambda: changed("mlp_0", fewer_inputs),
    "embedding writes 17 of 18 sites": lambda: changed("embedding", fewer_columns),
    "operators.attention_2 writes 18 of 18 sites, in another order": lambda: changed(
        "attention_2", lambda part: part.write.sites.copy_(part.write.sites.flip(0))
    ),
    "operators.attention_2 was removed, and the rest of its layer was not": lambda: without(
        "attention_2"
    ),
    "it has no layers left": lambda: stock_without_layers(),
    "operators.attention_2 has other RoPE frequencies than operators.attention_0": lambda: changed(
        "attention_2", lambda part: part.frequencies.mul_(0.5)
    ),
    "operators.mlp_2 weighs sites unequally in its normaliser, by up to 2 times": lambda: changed(
        "mlp_2", lambda part: part.read.weight[3:5].mul_(2)
    ),
    "operators.mlp_2 has another ratio of eps and normaliser weights": with_eps,
}
OTHER: dict[str, Callable[[], Transformer]] = {
    "it has learned positions": lambda: stock(positions=True),
    "its MLPs are 'gelu'": lambda: stock(also={"mlp": "gelu"}),
    "its operators write biases": lambda: stock(also={"write_bias": True}),
    "its outputs have biases": lambda: stock(also={"head_bias": True}),
    "its head is the table plus a mean": lambda: stock(also={"tied_head": True, "tied_mean": True}),
    "it normalises queries and keys": lambda: stock(also={"qk_norm": True}),
    "operators.attention_2 has a sliding window of 23 tokens": lambda: changed(
        "attention_2", lambda part: setattr(part, "window", 23)
    ),
    "operators.attention_0 has no RoPE": lambda: stock(rope=False),
    "it has 255 outputs for 256 tokens": lambda: stock(outputs=255),
    "no rope_theta gives the RoPE frequencies of operators.attention_0": lambda: odd_frequencies(),
}


def stock_without_layers() -> Transformer:
    model = without("attention_2")
    for name in ("mlp_2", "attention_0", "mlp_0"):
        model.remove_operator(name)
    return model


def odd_frequencies() -> Transformer:
    model = stock()
    for name in ("attention_0", "attention_2"):
        model.get_buffer(f"operators.{name}.frequencies")[0] *= 1.5
    return model


def test_a_window_as_long_as_the_context_is_stock(tmp_path: Path) -> None:
    model = changed("attention_2", lambda part: setattr(part, "window", 24))
    assert export(write_run(tmp_path / "run", model), "llama").deviation < 1e-4


_SHAPED = "; compress with compress.shape = 'llama' and compress.removal = 'harm', or choose"


@pytest.mark.parametrize(
    ("why", "make", "hint"),
    [
        *((why, make, _SHAPED) for why, make in CUT.items()),
        *((why, make, "; choose hf, onnx") for why, make in OTHER.items()),
    ],
    ids=[*CUT, *OTHER],
)
def test_what_is_not_stock_is_refused_with_the_reason(
    why: str, make: Callable[[], Transformer], hint: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", make())
    for form in ("llama", "gguf"):
        with pytest.raises(UserError) as refused:
            export(run, form, tmp_path / "out")
        said = str(refused.value)
        assert f"form {form!r} holds stock Llama models, and {str(run)!r} is none: {why}" in said
        assert hint in said
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny(causal=False))
    for form in ("llama", "gguf"):
        with pytest.raises(UserError, match=f"form '{form}' holds causal language models"):
            export(run, form, tmp_path / "out")


def test_other_weights_without_eps_are_gains(tmp_path: Path) -> None:
    """x / sqrt(c sum x^2): without eps, c is a factor of what is read."""
    model = stock()
    model.get_submodule("operators.mlp_2.read").weight.mul_(2)
    assert export(write_run(tmp_path / "run", model), "gguf").deviation < 1e-5


LLAMA_3 = Rope(500_000.0, 32.0, Bands(1.0, 4.0, 8192.0))


@pytest.mark.parametrize(
    ("rope", "pairs"),
    [
        (Rope(10_000.0), 32),
        (Rope(500_000.0), 64),
        (Rope(1_000_000.0), 1),
        (Rope(123_456.789), 32),
        (Rope(100_000.0, 4.0), 32),
        (LLAMA_3, 32),
        (Rope(500_000.0, 8.0, Bands(1.0, 4.0, 8192.0)), 64),
        (Rope(531.0, 6.0, Bands(1.5, 9.0, 200.0)), 8),
        (Rope(10_000.0, 3.0, Bands(1.0, 4.0, 300.0)), 6),  # one between
        (Rope(10_000.0, 3.0, Bands(1.0, 1.2, 300.0)), 4),  # none between
    ],
    ids=str,
)
def test_settings_of_rope_have_its_frequencies(rope: Rope, pairs: int) -> None:
    given = torch.tensor(rope.frequencies(pairs)).tolist()  # float32, as a model has them
    found = fitted(given)
    assert found is not None
    assert torch.allclose(torch.tensor(found.frequencies(pairs)), torch.tensor(given), rtol=1e-6)
    if pairs == 32 and rope.theta != 123_456.789:
        assert found == rope


@pytest.mark.parametrize("given", [[1.0, 0.5, 0.4, 0.001], [2.0, 0.1], [0.1, 1.0], [1.0, 0.0]])
def test_other_frequencies_have_no_settings(given: list[float]) -> None:
    assert fitted(given) is None
