"""The masked autoencoder: patches and masks, images from every source, and what is shown."""

import io
import json
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gaugelasso import durable
from gaugelasso.axes import named_tensors
from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.pricing import ACCOUNTINGS, total_fma
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.tasks import EVALUATION, Draw, MaskedAutoencoder, images
from gaugelasso.trainer import Trainer
from tests.command import Command, assert_told

CONFIGS = Path(__file__).parents[1] / "configs" / "mae"
TASK = MaskedAutoencoder(size=12, patch=4)
HELD_OUT = Draw(0, stream=EVALUATION)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))


def pictures(count: int, seed: int = 0, size: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def pack(path: Path, **parts: list[bytes]) -> Path:
    arrays = {}
    for part, members in parts.items():
        arrays[f"{part}_data"] = np.frombuffer(b"".join(members), dtype=np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, members)])
    np.savez(path, **arrays)
    return path


def packed(folder: Path, train: int = 5, valid: int = 3) -> Path:
    members = {"train": pictures(train), "valid": pictures(valid, seed=1)}
    return pack(
        folder / "faces.npz", **{part: [encoded(p) for p in m] for part, m in members.items()}
    )


def seen(task: MaskedAutoencoder, targets: torch.Tensor) -> np.ndarray:
    """Targets as the images they were."""
    held = images.load(task.path, task.size)
    pixels = task.join(targets[..., :-1]) * torch.tensor(held.std) + torch.tensor(held.mean)
    return (pixels * 255).round().byte().numpy()


def said(path: Path | str, size: int = 12) -> str:
    with pytest.raises(UserError) as told:
        MaskedAutoencoder(path=str(path), size=size, patch=4).batch(2, Draw(0), "cpu")
    assert "\n" not in str(told.value)
    return str(told.value)


# --- patches, masks, loss ---------------------------------------------------------------


def test_an_image_is_cut_row_by_row() -> None:
    pixels = torch.arange(12 * 12 * 3.0).view(1, 12, 12, 3)
    patches = TASK.cut(pixels)
    assert patches.shape == (1, TASK.length, TASK.inputs) == (1, 9, 48)
    assert torch.equal(patches[0, 5].view(4, 4, 3), pixels[0, 4:8, 8:12])
    assert torch.equal(TASK.join(patches), pixels)


@pytest.mark.parametrize("draw", [Draw(7, 3), HELD_OUT], ids=["training", "held out"])
def test_hidden_patches_are_blank_and_marked(draw: Draw) -> None:
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


def test_all_runs_are_measured_on_the_same_images_and_masks() -> None:
    one, other = (TASK.batch(4, Draw(run, 2, EVALUATION), "cpu")[0] for run in (1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(*(TASK.batch(4, Draw(run, 2), "cpu")[0] for run in (1, 2)))


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
    ],
)
def test_a_senseless_task_is_refused(keys: dict[str, Any], words: str) -> None:
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
def test_the_configs_begin_at_the_paper_s_figures(name: str, figure: int) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    with torch.device("meta"):
        model = Transformer(config.model.spec(config.task))
    accounting = ACCOUNTINGS[config.compress.accounting]
    assert total_fma(model.axis_table(), accounting, named_tensors(model)) == figure


# --- images -----------------------------------------------------------------------------


def test_every_epoch_shows_every_image_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path)), size=12, patch=4, flip=False)
    originals = [p.tobytes() for p in pictures(5)]
    # Batches of 2 go across the end of an epoch of 5.
    shown = [
        originals.index(p.tobytes())
        for index in range(10)
        for p in seen(task, task.batch(2, Draw(3, index), "cpu")[1])
    ]
    epochs = [tuple(shown[start : start + 5]) for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    # The order is the run's own, and does not hang on the size of a batch.
    whole = seen(task, task.batch(20, Draw(3), "cpu")[1])
    assert [originals.index(p.tobytes()) for p in whole] == shown
    other = seen(task, task.batch(20, Draw(4), "cpu")[1])
    assert [originals.index(p.tobytes()) for p in other] != shown


def test_held_out_images_come_in_order_and_upright(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path)), size=12, patch=4)
    shown = seen(task, task.batch(4, HELD_OUT, "cpu")[1])
    assert np.array_equal(shown, pictures(3, seed=1)[[0, 1, 2, 0]])


def test_half_of_the_training_images_are_mirrored(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, train=1)), size=12, patch=4)
    upright = pictures(1)[0]
    shown = seen(task, task.batch(40, Draw(0), "cpu")[1])
    mirrored = [np.array_equal(p, upright[:, ::-1]) for p in shown]
    assert 8 < sum(mirrored) < 32
    assert all(m or np.array_equal(p, upright) for m, p in zip(mirrored, shown, strict=True))


def test_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path)
    held = images.load(str(path), 12)
    assert np.array_equal(held.parts["train"], pictures(5))
    scaled = pictures(5).reshape(-1, 3) / 255
    assert held.mean == pytest.approx(scaled.mean(0))
    assert held.std == pytest.approx(scaled.std(0))
    assert [p.name for p in (tmp_path / "cache" / "images").glob("tmp*")] == []
    images.load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(images, "_decode", None)
        assert np.array_equal(images.load(str(path), 12).parts["valid"], held.parts["valid"])
    images.load.cache_clear()
    pack(path, train=[encoded(p) for p in pictures(2)], valid=[encoded(pictures(1)[0])])
    assert len(images.load(str(path), 12).parts["train"]) == 2


@pytest.mark.parametrize("name", ["train.npy", "valid.npy", "about.json"])
@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:-1] + b"#"])
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = packed(tmp_path)
    images.load(str(path), 12)
    [cached] = (tmp_path / "cache" / "images").glob(f"*/{name}")
    cached.write_bytes(spoil(cached.read_bytes()))
    images.load.cache_clear()
    held = images.load(str(path), 12)
    assert np.array_equal(held.parts["train"], pictures(5))
    assert np.array_equal(held.parts["valid"], pictures(3, seed=1))
    [told] = caplog.messages
    assert told.startswith(f"warning: cache '{cached.parent}' is damaged")


def test_many_may_mend_a_damaged_cache_at_once(tmp_path: Path) -> None:
    path = packed(tmp_path)
    images.load(str(path), 12)
    cache = tmp_path / "cache" / "images"
    with ThreadPoolExecutor(4) as runs:
        for _ in range(8):
            [cached] = cache.glob("*/train.npy")
            cached.write_bytes(cached.read_bytes()[:-1] + b"#")
            together = Barrier(4)
            loads = [runs.submit(_load_together, path, together) for _ in range(4)]
            for load in loads:
                assert np.array_equal(load.result().parts["train"], pictures(5))
            [left] = cache.iterdir()
            assert images._cached(left), "what is left is whole"


def _load_together(path: Path, together: Barrier) -> images.Images:
    together.wait()
    return images.load.__wrapped__(str(path), 12)


def test_what_was_made_is_used_even_if_another_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = durable.rename

    def rename(old: Path, new: Path) -> None:
        inner(old, new)
        inner(new, tmp_path / "moved")  # by who saw a damaged one there

    path = packed(tmp_path)
    monkeypatch.setattr(durable, "rename", rename)
    assert np.array_equal(images.load(str(path), 12).parts["train"], pictures(5))


def test_a_run_goes_on_with_the_images_it_began_with(tmp_path: Path) -> None:
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


def test_a_folder_may_be_split_or_is_split_by_name(tmp_path: Path) -> None:
    for number, pixels in enumerate(pictures(60)):
        folder = tmp_path / "split" / ("valid" if number < 4 else "train")
        for place in (folder / f"{number:02}.png", tmp_path / "mixed" / f"{number:02}.PNG"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(encoded(pixels))
    (tmp_path / "mixed" / "notes.txt").write_text("no image")
    split = images.load(str(tmp_path / "split"), 12)
    assert np.array_equal(split.parts["valid"], pictures(60)[:4])
    mixed = images.load(str(tmp_path / "mixed"), 12)
    held_out = {p.tobytes() for p in mixed.parts["valid"]}
    assert len(mixed.parts["train"]) + len(held_out) == 60
    # A new file moves none from one part to the other.
    (tmp_path / "mixed" / "another.png").write_bytes(encoded(pictures(1, seed=9)[0]))
    images.load.cache_clear()
    later = {p.tobytes() for p in images.load(str(tmp_path / "mixed"), 12).parts["valid"]}
    assert held_out <= later


def test_celeba_is_cut_square_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    face = np.zeros((218, 178, 3), dtype=np.uint8)
    face[20:198] = 200

    def load_dataset(name: str, split: str) -> list[dict[str, Image.Image]]:
        assert (name, split) in {("flwrlabs/celeba", "train"), ("flwrlabs/celeba", "valid")}
        return [{"image": Image.fromarray(face)}] * 2

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    images.load.cache_clear()
    assert (images.load("celeba", 12).parts["valid"] == 200).all()


def test_celeba_out_of_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    images.load.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = said("celeba")
    assert "needs the package datasets: pip install 'gaugelasso[images]'" in message
    assert message.endswith("or give a packed .npz or a folder as task.path")

    def load_dataset(name: str, split: str) -> None:
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert "cannot be loaded (no route to the hub)" in said("celeba")


@pytest.mark.parametrize("error", [OSError("cut\nshort"), KeyError("image"), SyntaxError("odd")])
def test_a_bad_row_of_celeba_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise error
            return {"image": Image.fromarray(np.zeros((218, 178, 3), np.uint8))}

    module = types.SimpleNamespace(load_dataset=lambda name, split: Rows(range(3)))
    monkeypatch.setitem(sys.modules, "datasets", module)
    images.load.cache_clear()
    message = said("celeba")
    assert "train image 1 of CelebA cannot be read (" in message
    assert "GAUGELASSO_CACHE" not in message


def test_pillow_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "needs the package pillow" in said(path)


def test_what_is_no_image_set_is_named(tmp_path: Path) -> None:
    good, small = encoded(pictures(1)[0]), encoded(pictures(1, size=8)[0])
    assert "no such file or folder" in said(tmp_path / "nowhere")
    assert "write the path in full" in said("~nobody-here/faces.npz")
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text.npz", "one.npy"):
        message = said(tmp_path / name)
        assert "not a readable .npz file (it is no zip archive of arrays" in message
        assert "a packed file of images is an .npz with the arrays train_data" in message
    np.savez(tmp_path / "keys.npz", train_data=np.zeros(3, np.uint8))
    assert "has no array 'train_offsets'" in said(tmp_path / "keys.npz")
    np.savez(
        tmp_path / "fit.npz",
        **{f"{part}_data": np.zeros(3, np.uint8) for part in images.PARTS},
        **{f"{part}_offsets": np.array([0, 9]) for part in images.PARTS},
    )
    assert "train_offsets does not fit train_data" in said(tmp_path / "fit.npz")
    for numbers in ([0, 2, 1, 3], [0, 2, 2, 3], [-1, 3], []):
        fall = {f"{part}_offsets": np.array(numbers, np.int64) for part in images.PARTS}
        data = {f"{part}_data": np.zeros(3, np.uint8) for part in images.PARTS}
        np.savez(tmp_path / "fall.npz", **fall, **data)
        assert "they must rise from one to the next" in said(tmp_path / "fall.npz")
    np.savez(tmp_path / "fall.npz", **fall, **{name: np.zeros(3) for name in data})
    assert "train_data must be one row of uint8" in said(tmp_path / "fall.npz")
    for spoiled in (good[:-30], b"no image"):
        bad = pack(tmp_path / "bad.npz", train=[good, spoiled], valid=[good])
        message = said(bad)
        assert f"train image 1 of {str(bad)!r} is not a readable image (" in message
        assert message.endswith("; remove or replace it")
        assert "0x" not in message
    size = pack(tmp_path / "size.npz", train=[good], valid=[small])
    assert "valid image 0" in said(size)
    assert "is 8x8 pixels, but task.size = 12 expects 12x12" in said(size)
    assert "has no images for valid" in said(pack(tmp_path / "none.npz", train=[good], valid=[]))
    # Nothing half decoded stays behind.
    assert list((tmp_path / "cache" / "images").iterdir()) == []


def test_a_folder_without_good_images_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "no images in this folder; put files into it that end in .bmp, .jpeg" in said(folder)
    (folder / "a.png").write_bytes(encoded(pictures(1)[0]))
    assert "too few images" in said(folder)
    for part in images.PARTS:
        (folder / part).mkdir()
        (folder / part / "b.png").write_bytes(encoded(pictures(1)[0])[:60])
    message = said(folder)
    assert f"{str(folder / 'train' / 'b.png')!r} is not a readable image" in message


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path)
    monkeypatch.setenv("GAUGELASSO_CACHE", str(path))
    assert "set GAUGELASSO_CACHE to a folder with room" in said(path)


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(images.load("~/faces.npz", 12).parts["train"]) == 5


def cut_archive(path: Path) -> Path:
    whole = pack(path, train=[GOOD], valid=[GOOD])
    whole.write_bytes(whole.read_bytes()[:-50])
    return whole


def bad_folder(folder: Path, data: bytes | None) -> Path:
    for part in images.PARTS:
        (folder / part).mkdir(parents=True)
        if data is not None:
            (folder / part / "a.png").write_bytes(data)
    return folder


GOOD = encoded(pictures(1, size=32)[0])
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder without images": (lambda p: bad_folder(p, None), "no images in this folder"),
    "corrupt image": (lambda p: bad_folder(p, GOOD[:-30]), "remove or replace it"),
    "no image": (lambda p: bad_folder(p, b"no image"), "remove or replace it"),
    "corrupt member": (
        lambda p: pack(p.with_suffix(".npz"), train=[GOOD[:-30]], valid=[GOOD]),
        "train image 0 of ",
    ),
    "corrupt archive": (lambda p: cut_archive(p.with_suffix(".npz")), "or not a whole one"),
    "wrong size": (
        lambda p: bad_folder(p, encoded(pictures(1)[0])),
        "is 12x12 pixels, but task.size = 32 expects 32x32; resize the images",
    ),
    "no home": (lambda p: Path("~nobody-here"), "write the path in full"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_end_a_command_with_one_line(
    tmp_path: Path, gaugelasso: Command, name: str
) -> None:
    make, words = BAD[name]
    change = f"task.path={make(tmp_path / 'bad')}"
    run = tmp_path / "run"
    assert_told(gaugelasso("train", CONFIGS / "small.toml", "--out", run, "--set", change), words)
    assert not run.exists()


# --- a run ------------------------------------------------------------------------------


def tiny(**task: Any) -> Config:
    return Config.from_dict(
        {
            "task": {"name": "mae", "size": 12, "patch": 4, **task},
            "model": {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8}
            | {"rope": False, "positions": True},
            "target": {"loss": 5.0},
            "train": {"steps": 4, "warmup": 1, "cooldown": 1, "batch": 3, "log_every": 2}
            | {"final_batches": 1, "device": "cpu"},
        }
    )


@pytest.mark.parametrize("change", ["model.positions=false", "model.rope=true"])
def test_a_model_without_places_is_refused(
    tmp_path: Path, gaugelasso: Command, change: str
) -> None:
    small = CONFIGS / "small.toml"
    answer = gaugelasso("train", small, "--out", tmp_path / "run", "--set", change)
    assert_told(answer, "set model.positions = true and model.rope = false")


def test_a_run_ends_with_examples_that_the_report_shows(tmp_path: Path) -> None:
    summary = Trainer(tiny(), tmp_path / "run").run()
    assert summary["metric"] == {"name": "masked_mse", "value": summary["loss"]}
    with np.load(tmp_path / "run" / "samples.npz") as held:
        shown = {name: held[name] for name in held.files}
    assert list(shown) == ["original", "masked", "reconstructed"]
    assert all(array.shape == (3, 12, 12, 3) for array in shown.values())
    # The reconstruction keeps what was seen: where masked shows the original.
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


@pytest.mark.parametrize("asked", [False, True])
def test_images_of_users_are_shown_only_if_asked(tmp_path: Path, asked: bool) -> None:
    path = str(packed(tmp_path))
    Trainer(tiny(path=path, pictures=asked), tmp_path / "run").run()
    assert (tmp_path / "run" / "samples.npz").exists() == asked
    assert bool(load_run(tmp_path / "run").samples()) == asked


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_whole_pass_sees_every_held_out_image_once(tmp_path: Path, size: int) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, valid=4)), size=12, patch=4)
    shown: list[torch.Tensor] = []

    def blank(inputs: torch.Tensor) -> torch.Tensor:
        shown.append(inputs)
        return torch.zeros_like(inputs[..., :-1])

    figures = task.whole_figures(blank, size, "cpu")
    # Nothing is foreseen: the loss of an image is the mean square of what it hides.
    losses, seen_once = [], []
    for index in range(-(-4 // size)):
        _, targets = task.batch(size, Draw(5, index, EVALUATION), "cpu")
        kept = targets[: 4 - index * size]
        losses += [float(task.loss(torch.zeros_like(one[..., :-1]), one)) for one in kept.split(1)]
        seen_once += [image.tobytes() for image in seen(task, kept)]
    assert seen_once == [image.tobytes() for image in pictures(4, seed=1)]
    assert sum(map(len, shown)) == 4
    assert figures == pytest.approx(dict.fromkeys(["loss", "masked_mse"], np.mean(losses)))
    assert task.whole_figures(blank, size, "cpu") == figures


def test_eval_of_all_held_out_images(tmp_path: Path, gaugelasso: Command) -> None:
    run, options = tmp_path / "run", ("--device", "cpu")
    Trainer(tiny(path=str(packed(tmp_path, valid=6))), run).run()
    code, whole, _ = gaugelasso("eval", run, "--whole", *options)
    assert code == 0
    assert whole.endswith("(all held-out data)\n")
    # Two batches of three are all of the six images.
    _, some, _ = gaugelasso("eval", run, "--batches", 2, *options)
    assert whole.partition("  (")[0] == some.partition("  (")[0]
    generated = ("--set", "task.path=generated", *options)
    answer = gaugelasso("eval", run, "--whole", *generated)
    assert_told(answer, "--whole: task 'mae' knows no end of its held-out data; use --batches")


def test_missing_data_does_not_cost_an_older_run(tmp_path: Path) -> None:
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
