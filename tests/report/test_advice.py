"""Advice: which keys change and why, and a config that loads."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.report.advice import Advice, advise, narrower, wider
from gaugelasso.report.toml import to_toml
from tests.report.folders import event, final_widths, initial_widths, make_run

MODEL = {"width": 8, "d_k": 8, "d_v": 8, "d_f": 16, "heads": 4}


def run_with(path: Path, widths: dict[str, int], **options: Any) -> Path:
    """A finished run that ended with these widths."""
    layers = 1 + max(int(name.split("_")[1].split(".")[0]) for name in widths if "mlp_" in name)
    options = {"layers": layers, **options}
    drops = [event(40, 1000.0, 500.0, {"D": 1}, [], widths)]
    return make_run(path, events=drops, changes={"model": MODEL}, **options)


def every(kinds: dict[str, int], layers: int) -> dict[tuple[str, int], int]:
    return {(kind, depth): width for kind, width in kinds.items() for depth in range(layers)}


def slim(layers: int = 2, **ends: int) -> dict[str, int]:
    """Widths that need no change: half of every axis."""
    halves = {"d_ai": 4, "d_k": 2, "d_v": 4, "d_ao": 4, "d_mi": 4, "d_f": 8, "d_mo": 4}
    return final_widths(layers, every(halves, layers)) | {"D": 5} | ends


def changed(advice: Advice) -> dict[str, tuple[int, int]]:
    return {change.key: (change.old, change.new) for change in advice.changes}


def test_nothing_to_change(tmp_path: Path) -> None:
    advice = advise([run_with(tmp_path / "r", slim())])
    assert changed(advice) == {}
    assert advice.lines[0] == "Held-out loss 0.03, within the loss target of 0.05."
    assert advice.lines[1].startswith("Nothing to change")


def test_a_missed_metric_without_a_cut_says_nothing_of_widths(tmp_path: Path) -> None:
    """All cuts were taken back: the full widths are no ceilings."""
    taken_back = [event(40, 1000.0, 1000.0, {"D": 1}, [], initial_widths(2))]
    changes = {"model": MODEL, "target": {"loss": None, "metric": 0.99, "hold": "final"}}
    run = make_run(tmp_path / "r", events=taken_back, changes=changes)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"metric_target": 0.99, "selection_metric": 0.5, "held": False, "loss_target": None}
    (run / "summary.json").write_text(json.dumps(summary))
    advice = advise([run])
    assert changed(advice) == {}
    assert "the widths carry no information" in " ".join(advice.lines)


def test_a_rival_is_not_advised_on(tmp_path: Path) -> None:
    """Its config would be trained without pressure again."""
    run = run_with(tmp_path / "r", slim())
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"method": "post-hoc", "source": {"training_fma": 1.0}, "pruning": {}}
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match=r"of another method \(post-hoc\), whose config does not"):
        advise([run])


def test_an_axis_at_its_ceiling_in_most_layers_is_widened(tmp_path: Path) -> None:
    widths = slim(3) | {f"operators.attention_{d}.d_k": 4 for d in (0, 2)}
    assert changed(advise([run_with(tmp_path / "two", widths)])) == {"d_k": (8, 12)}
    widths["operators.attention_1.d_k"] = 4
    advice = advise([run_with(tmp_path / "all", widths)])
    assert changed(advice) == {"d_k": (8, 16)}
    assert str(advice.changes[0]) == (
        "widen d_k, 8 → 16: at its ceiling in 3 of 3 layers that kept it"
    )
    # A removed operator does not count.
    widths = {name: w for name, w in widths.items() if "attention_0" not in name}
    assert "2 of 2 layers" in advise([run_with(tmp_path / "removed", widths)]).lines[1]


def test_half_of_the_layers_are_not_most(tmp_path: Path) -> None:
    widths = slim() | {"operators.mlp_1.d_f": 16}
    assert changed(advise([run_with(tmp_path / "r", widths)])) == {}


def test_an_axis_of_which_layers_keep_little_is_halved(tmp_path: Path) -> None:
    widths = slim(D=2) | {"operators.mlp_0.d_f": 1, "operators.mlp_1.d_f": 4}
    advice = advise([run_with(tmp_path / "r", widths)])
    assert changed(advice) == {"width": (8, 4), "d_f": (16, 8)}
    assert advice.lines[1:] == [
        "narrow width, 8 → 4: only 25% of D is left",
        "narrow d_f, 16 → 8: no layer keeps more than 25%",
    ]
    widths["operators.mlp_1.d_f"] = 5
    assert "d_f" not in changed(advise([run_with(tmp_path / "more", widths)]))


def test_a_full_stream_is_widened(tmp_path: Path) -> None:
    assert changed(advise([run_with(tmp_path / "r", slim(D=8))])) == {"width": (8, 16)}


@pytest.mark.parametrize(
    ("empty", "layers", "text"),
    [((3,), (4, 3), "layer 3"), ((0, 1, 3), (4, 2), "layers 0–1, 3")],
)
def test_empty_layers_are_removed(
    tmp_path: Path, empty: tuple[int, ...], layers: tuple[int, int], text: str
) -> None:
    removed = [f"{operator}_{depth}." for operator in ("attention", "mlp") for depth in empty]
    widths = {name: w for name, w in slim(4).items() if not any(part in name for part in removed)}
    advice = advise([run_with(tmp_path / "r", widths, layers=4)])
    assert changed(advice) == {"layers": layers}
    assert advice.lines[1].endswith(f"nothing is left of {text}")


def test_layers_are_added_if_all_are_full(tmp_path: Path) -> None:
    advice = advise([run_with(tmp_path / "r", initial_widths(2))])
    assert changed(advice)["layers"] == (2, 3)
    assert changed(advice)["d_f"] == (16, 32)


def test_a_missed_target_makes_nothing_smaller(tmp_path: Path) -> None:
    widths = slim(D=8) | {"operators.mlp_0.d_f": 1, "operators.mlp_1.d_f": 1}
    advice = advise([run_with(tmp_path / "r", widths, loss=0.5)])
    assert changed(advice) == {"width": (8, 16)}
    assert advice.lines[0] == "Held-out loss 0.5, above the loss target of 0.05."
    assert advice.lines[-1].endswith("not made smaller: d_f")
    advice = advise([run_with(tmp_path / "slim", slim(), loss=0.5)])
    assert "will help more than width" in advice.lines[-1]


def test_a_target_never_reached_changes_no_width(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "r", initial_widths(2), loss=0.5)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"target_reached_step": None}))
    advice = advise([folder])
    assert changed(advice) == {}
    assert advice.lines[1].startswith("Compression never started")
    assert "Nothing changed." in advice.config


@pytest.mark.parametrize(
    ("compress", "reason"),
    [
        ({"solver": "fixed", "rho": 0.0}, "compress.rho = 0 switches the penalty off"),
        ({"solver": "conservative", "rho": 0.0}, "no structural event took place"),
        ({"solver": "fixed", "rho": 1.0}, "no structural event took place"),
    ],
)
def test_a_run_without_a_structural_event_changes_no_width(
    tmp_path: Path, compress: dict[str, Any], reason: str
) -> None:
    changes = {"model": MODEL, "compress": compress}
    rollback = event(40, 1000.0, 1000.0, {}, [], initial_widths(2)) | {"returned_to": 20}
    for name, events in (("none", []), ("rollback", [rollback])):
        advice = advise([make_run(tmp_path / name, events=events, changes=changes)])
        assert changed(advice) == {}
        verdict, remark = advice.lines
        assert verdict == "Held-out loss 0.03, within the loss target of 0.05."
        assert remark.startswith(
            f"Compression never started, so the widths carry no information: {reason}"
        )
        assert "Nothing changed." in advice.config


def test_medians_over_the_seeds_of_a_sweep_decide(tmp_path: Path) -> None:
    for seed, sites in enumerate((8, 8, 2)):
        run_with(tmp_path / f"seed{seed}", slim(D=sites), seed=seed)
    advice = advise([tmp_path])
    assert changed(advice) == {"width": (8, 16)}
    assert "3 seeds" in advice.config.splitlines()[0]


@pytest.mark.parametrize("even", [False, True])
def test_widths_are_round_and_at_most_doubled_or_halved(even: bool) -> None:
    assert (wider(96, 2, even), wider(45, 2, False), wider(100, 1.6, even)) == (192, 88, 160)
    assert (narrower(1536, even), narrower(45, False), narrower(90, even)) == (768, 24, 48)
    for old in range(2 if even else 1, 700, 2 if even else 1):
        for factor in (1.51, 1.75, 2):
            assert old < wider(old, factor, even) <= 2 * old
        assert old / 2 <= narrower(old, even) <= old
        if even:
            assert wider(old, 1.6, even) % 2 == narrower(old, even) % 2 == 0


# --- the config ----------------------------------------------------------------------


def settings() -> dict[str, dict[str, Any]]:
    return Config.from_dict({"task": {"name": "retrieval"}}).to_dict()


def test_toml_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    odd = {
        "a b": 'quote " slash \\ line\n tab\t del\x7f snow ☃ far 𝄞',
        "empty": "",
        "small": 1e-300,
        "large": 1e22,
        "endless": float("inf"),
        "whole": -3,
        "yes": True,
        "list": [1, 2.5, "x"],
    }
    sections = {"first": odd, "second part": {}}
    text = to_toml(sections, {"first.whole": "two\nlines"})
    assert tomllib.loads(text) == sections
    assert "# two?lines\nwhole = -3\n" in text
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings()))
    assert load_config(path).to_dict() == settings()


@pytest.mark.parametrize("value", [{"deep": 1}, [None]])
def test_a_value_that_toml_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"part\.key = .* cannot be written as TOML"):
        to_toml({"part": {"key": value}})


def test_the_next_config_is_the_run_s_own_with_the_changes(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", slim(D=8))
    before = settings()
    before["model"] |= MODEL | {"layers": 2}
    (folder / "config.json").write_text(json.dumps(before))
    path = tmp_path / "next.toml"
    path.write_text(advise([folder]).config)
    after = load_config(path).to_dict()
    assert after == before | {"model": before["model"] | {"width": 16}}
    assert "# was 8: 100% of D is left\nwidth = 16\n" in path.read_text()


def test_runs_that_allow_no_advice_are_refused(tmp_path: Path) -> None:
    unfinished = make_run(tmp_path / "unfinished", finished=False)
    with pytest.raises(UserError, match=f"'{unfinished}' is not finished"):
        advise([unfinished])
    with pytest.raises(UserError, match=f"'{tmp_path / 'nowhere'}' is not a run folder"):
        advise([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="key 'd_k' is missing"):
        advise([make_run(tmp_path / "foreign")])


def test_a_key_that_is_not_given_is_left_out_of_toml() -> None:
    assert to_toml({"target": {"loss": None, "fma": 3.0}}) == "[target]\nfma = 3.0\n"
