"""The masked autoencoder: patches and masks, its runs and its pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.tasks import SELECTION, TEST, TRAINING, Draw, MaskedAutoencoder, images
from gaugelasso.training.evaluation import predictor
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error
from tests.tasks.faces import encoded, pack, packed, pictures, seen
from tests.tiny_runs import assert_same_run, stop_at

pytestmark = pytest.mark.usefixtures("own_cache")

CONFIGS = Path(__file__).parents[2] / "configs" / "mae"
TASK = MaskedAutoencoder(size=12, patch=4)
HELD_OUT = Draw(0, stream=SELECTION)


# --- patches, masks, loss ---------------------------------------------------------------


def test_an_image_is_cut_row_by_row() -> None:
    pixels = torch.arange(12 * 12 * 3.0).view(1, 12, 12, 3)
    patches = TASK.cut(pixels)
    assert patches.shape == (1, TASK.length, TASK.inputs) == (1, 9, 48)
    assert torch.equal(patches[0, 5].view(4, 4, 3), pixels[0, 4:8, 8:12])
    assert torch.equal(TASK.join(patches), pixels)


@pytest.mark.parametrize("draw", [Draw(7, 3), HELD_OUT], ids=["training", "held out"])
def test_hidden_patches_are_zero_and_marked(draw: Draw) -> None:
    inputs, targets = TASK.batch(6, draw, "cpu")
    mask = inputs[..., -1]
    assert torch.equal(mask, targets[..., -1])
    assert mask.sum(1).tolist() == [7.0] * 6  # 75% of 9, rounded
    assert not inputs[..., :-1][mask == 1].any()
    assert torch.equal(inputs[mask == 0], targets[mask == 0])
    assert targets[..., :-1][mask == 1].abs().mean() > 0.1
    assert len(torch.unique(mask, dim=0)) > 1


def test_a_batch_depends_on_its_draw_alone() -> None:
    first = TASK.batch(4, Draw(5), "cpu")
    state = torch.random.get_rng_state()
    again = TASK.batch(4, Draw(5), "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], TASK.batch(4, Draw(5, 1), "cpu")[1])


@pytest.mark.parametrize("stream", [SELECTION, TEST])
def test_all_runs_are_measured_on_the_same_images_and_masks(stream: int) -> None:
    one, other = (TASK.batch(4, Draw(run, 2, stream), "cpu")[0] for run in (1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(*(TASK.batch(4, Draw(run, 2), "cpu")[0] for run in (1, 2)))


def test_the_streams_generate_different_images() -> None:
    streams = (TRAINING, SELECTION, TEST)
    drawn = torch.cat([TASK.batch(20, Draw(0, 0, s), "cpu")[1] for s in streams])
    assert len({image.numpy().tobytes() for image in drawn}) == 60


def test_pixels_are_standardised() -> None:
    values = TASK.batch(400, Draw(0), "cpu")[1][..., :-1].reshape(-1, 3)
    assert values.mean(0).abs().max() < 0.1
    assert (values.std(0) - 1).abs().max() < 0.1


def test_the_loss_is_the_error_on_hidden_patches() -> None:
    _, targets = TASK.batch(5, Draw(0), "cpu")
    patches, mask = targets[..., :-1], targets[..., -1:]
    wrong_where_seen = patches + 3 * (1 - mask)
    assert float(TASK.loss(wrong_where_seen, targets)) == pytest.approx(0, abs=1e-9)
    assert float(TASK.loss(patches + 2 * mask, targets)) == pytest.approx(4, rel=1e-5)
    error = (patches[mask[..., 0] == 1] ** 2).mean()
    assert float(TASK.metric(torch.zeros_like(patches), targets)) == pytest.approx(float(error))
    assert TASK.loss(patches.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"size": 0}, r"task\.size = 0"),
        ({"patch": -4}, r"task\.patch = -4"),
        ({"size": 12, "patch": 5}, r"task\.patch = 5 does not divide task\.size = 12"),
        ({"masked": 0.0}, r"task\.masked = 0\.0: must hide some of the 256"),
        ({"masked": 1.0}, r"task\.masked = 1\.0"),
        ({"masked": 0.001}, r"leave some visible"),
        ({"masked": float("nan")}, r"task\.masked = nan"),
        ({"path": ""}, r"task\.path is empty"),
        ({"shift": -1}, r"task\.shift = -1: must be 0 \(images stay in place\) to 127"),
        ({"size": 12, "patch": 4, "shift": 12}, r"task\.shift = 12: .* below task\.size = 12"),
    ],
)
def test_invalid_settings_are_rejected(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MaskedAutoencoder(**keys)


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("uniform", 12_052_224),
        ("main", 90_183_168),
        ("loose", 90_183_168),
        ("wide", 145_233_408),
    ],
)
def test_the_configs_have_the_paper_s_initial_work(name: str, figure: int) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    with torch.device("meta"):
        model = Transformer(config.model.spec(config.task))
    accounting = ACCOUNTINGS[config.compress.accounting]
    assert total_fma(model.axis_table(), accounting, named_tensors(model)) == figure


# --- a run ------------------------------------------------------------------------------


def tiny(**task: Any) -> Config:
    return Config.from_dict(
        {
            "task": {"name": "mae", "size": 12, "patch": 4, **task},
            "model": {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8}
            | {"rope": False, "positions": True},
            "target": {"loss": 5.0, "hold": "pressed"},
            "train": {"steps": 4, "warmup": 1, "cooldown": 1, "batch": 3, "log_every": 2}
            | {"final_batches": 1, "device": "cpu"},
        }
    )


@pytest.mark.parametrize("change", ["model.positions=false", "model.rope=true"])
def test_a_model_without_positions_is_rejected(
    tmp_path: Path, gaugelasso: Command, change: str
) -> None:
    small = CONFIGS / "small.toml"
    answer = gaugelasso("train", small, "--out", tmp_path / "run", "--set", change)
    assert_user_error(answer, "set model.positions = true and model.rope = false")


@pytest.mark.usefixtures("undrawn")
def test_a_run_ends_with_examples_that_the_report_shows(tmp_path: Path) -> None:
    summary = Trainer(tiny(), tmp_path / "run").run()
    assert summary["metric"] == {"name": "masked_mse", "value": summary["loss"]}
    with np.load(tmp_path / "run" / "samples.npz") as held:
        shown = {name: held[name] for name in held.files}
    assert list(shown) == ["original", "masked", "reconstructed"]
    assert all(array.shape == (3, 12, 12, 3) for array in shown.values())
    # The reconstruction keeps the visible patches.
    kept = (shown["masked"] == shown["original"]).all(-1)
    assert 0.2 < kept.mean() < 0.5
    assert (shown["reconstructed"] == shown["original"])[kept].all()
    assert (shown["reconstructed"] != shown["original"])[~kept].any()
    files = write_report([tmp_path / "run"])
    assert files.samples is not None
    assert files.samples.read_bytes()[:4] == b"\x89PNG"
    page = files.page.read_text()
    assert "<h2>Examples</h2>" in page
    assert "lower is better" in page


@pytest.mark.parametrize("pictures_shown", [False, True])
def test_stored_images_are_shown_only_if_configured(tmp_path: Path, pictures_shown: bool) -> None:
    path = str(packed(tmp_path))
    Trainer(tiny(path=path, pictures=pictures_shown), tmp_path / "run").run()
    assert (tmp_path / "run" / "samples.npz").exists() == pictures_shown
    assert bool(load_run(tmp_path / "run").samples()) == pictures_shown


@pytest.mark.parametrize("stream", [SELECTION, TEST])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_whole_pass_covers_every_image_of_a_stream_once(
    tmp_path: Path, size: int, stream: int
) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, valid=8)), size=12, patch=4)
    shown: list[torch.Tensor] = []

    def blank(inputs: torch.Tensor) -> torch.Tensor:
        shown.append(inputs)
        return torch.zeros_like(inputs[..., :-1])

    figures = task.whole_figures(blank, size, "cpu", stream)
    # The outputs are zero, so the loss of an image is the mean square of its hidden patches.
    losses, seen_once = [], []
    for index in range(-(-4 // size)):
        _, targets = task.batch(size, Draw(5, index, stream), "cpu")
        kept = targets[: 4 - index * size]
        losses += [float(task.loss(torch.zeros_like(one[..., :-1]), one)) for one in kept.split(1)]
        seen_once += [image.tobytes() for image in seen(task, kept)]
    half = slice(4) if stream == SELECTION else slice(4, 8)
    assert seen_once == [image.tobytes() for image in pictures(8, seed=1)[half]]
    assert sum(map(len, shown)) == 4
    assert figures == pytest.approx(dict.fromkeys(["loss", "masked_mse"], np.mean(losses)))
    assert task.whole_figures(blank, size, "cpu", stream) == figures
    assert (task.whole_figures(blank, size, "cpu") == figures) == (stream == TEST)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_stored_streams_share_no_image(tmp_path: Path, count: int) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, valid=count)), size=12, patch=4)
    selection, test = task.part(SELECTION), task.part(TEST)
    assert np.array_equal(np.concatenate([selection, test]), pictures(count, seed=1))
    assert (len(selection), len(test)) == (count // 2, count - count // 2)
    assert np.array_equal(task.part(TRAINING), pictures(5))


def test_one_held_out_image_is_too_few(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, valid=1)), size=12, patch=4)
    for stream in (TRAINING, SELECTION, TEST):
        with pytest.raises(UserError, match=r"faces\.npz' has 1 held-out image; at least 2 are"):
            task.batch(1, Draw(0, 0, stream), "cpu")


def test_eval_of_all_test_images(tmp_path: Path, gaugelasso: Command) -> None:
    run, options = tmp_path / "run", ("--device", "cpu")
    config = tiny(path=str(packed(tmp_path, valid=6)))
    trainer = Trainer(config, run)
    trainer.run()
    code, out, _ = gaugelasso("eval", run, "--whole", *options)
    assert code == 0
    figures = config.task.whole_figures(predictor(trainer.model, config, "cpu"), 3, "cpu", TEST)
    assert out.startswith(f"loss {figures['loss']:.6f}")
    generated = ("--set", "task.path=generated", *options)
    answer = gaugelasso("eval", run, "--whole", *generated)
    assert_user_error(answer, "--whole: the test data of task 'mae' are not finite; use --batches")


def test_a_run_with_shifted_images_resumes_to_the_last_bit(tmp_path: Path) -> None:
    config = tiny(path=str(packed(tmp_path)), shift=3)
    Trainer(config, tmp_path / "whole").run()
    stop_at(Trainer(config, tmp_path / "died"), 3)
    Trainer(config, tmp_path / "died", "resume").run()
    assert_same_run(tmp_path / "whole", tmp_path / "died")
    still = Trainer(tiny(path=str(packed(tmp_path))), tmp_path / "still").run()
    assert still["loss"] != json.loads((tmp_path / "whole" / "summary.json").read_text())["loss"]


def test_missing_data_keep_an_existing_run(tmp_path: Path) -> None:
    Trainer(tiny(), tmp_path / "run").run()
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    with pytest.raises(UserError, match="no such file or folder"):
        Trainer(tiny(path=str(tmp_path / "gone.npz")), tmp_path / "run", "overwrite")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == before


def test_damaged_examples_are_named(tmp_path: Path) -> None:
    Trainer(tiny(), tmp_path / "run").run()
    path = tmp_path / "run" / "samples.npz"
    for damage in (b"half", None):
        if damage is None:
            np.savez(path, numbers=np.zeros(3))
        else:
            path.write_bytes(damage)
        with pytest.raises(UserError, match=r"samples\.npz"):
            load_run(tmp_path / "run").samples()


def test_resuming_needs_the_images_of_the_first_start(tmp_path: Path) -> None:
    path = packed(tmp_path)
    Trainer(tiny(path=str(path)), tmp_path / "run").run()
    others = pictures(5)
    others[3, 0, 0] ^= 1
    valid = [encoded(p) for p in pictures(3, seed=1)]
    pack(path, train=[encoded(p) for p in others], valid=valid)
    images.load.cache_clear()
    with pytest.raises(UserError, match=r"^--resume: the training images of '.*faces\.npz', "):
        Trainer(tiny(path=str(path)), tmp_path / "run", "resume")
    assert TASK.stored_data() == {}
