"""Images from every source: decoded once, drawn in order, and rejected with a clear error."""

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

from gaugelasso.errors import UserError
from gaugelasso.files import durable
from gaugelasso.tasks import SELECTION, TEST, Draw, MaskedAutoencoder, image_sources, images
from tests.command import Command, assert_user_error
from tests.tasks.faces import encoded, pack, packed, pictures, seen

pytestmark = pytest.mark.usefixtures("own_cache")


CONFIGS = Path(__file__).parents[2] / "configs" / "mae"


def error_of(path: Path | str, size: int = 12) -> str:
    with pytest.raises(UserError) as raised:
        MaskedAutoencoder(path=str(path), size=size, patch=4).batch(2, Draw(0), "cpu")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_every_epoch_has_every_image_once_in_a_new_order(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path)), size=12, patch=4, flip=False)
    originals = [p.tobytes() for p in pictures(5)]
    # Batches of 2 span the end of an epoch of 5.
    shown = [
        originals.index(p.tobytes())
        for index in range(10)
        for p in seen(task, task.batch(2, Draw(3, index), "cpu")[1])
    ]
    epochs = [tuple(shown[start : start + 5]) for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    # The order depends on the run, and not on the size of a batch.
    whole = seen(task, task.batch(20, Draw(3), "cpu")[1])
    assert [originals.index(p.tobytes()) for p in whole] == shown
    other = seen(task, task.batch(20, Draw(4), "cpu")[1])
    assert [originals.index(p.tobytes()) for p in other] != shown


@pytest.mark.parametrize(("stream", "order"), [(SELECTION, [0, 1, 0, 1]), (TEST, [2, 3, 4, 2])])
def test_held_out_images_are_in_order_and_not_flipped(
    tmp_path: Path, stream: int, order: list[int]
) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, valid=5)), size=12, patch=4)
    shown = seen(task, task.batch(4, Draw(0, stream=stream), "cpu")[1])
    assert np.array_equal(shown, pictures(5, seed=1)[order])


def test_half_of_the_training_images_are_flipped(tmp_path: Path) -> None:
    task = MaskedAutoencoder(path=str(packed(tmp_path, train=1)), size=12, patch=4)
    upright = pictures(1)[0]
    shown = seen(task, task.batch(40, Draw(0), "cpu")[1])
    mirrored = [np.array_equal(p, upright[:, ::-1]) for p in shown]
    assert 8 < sum(mirrored) < 32
    assert all(m or np.array_equal(p, upright) for m, p in zip(mirrored, shown, strict=True))


def moved(pixels: np.ndarray, down: int, across: int) -> np.ndarray:
    """Pixels [h, w, 3] moved down and across, with the border repeated."""
    framed = np.pad(pixels, ((12, 12), (12, 12), (0, 0)), mode="edge")
    return framed[12 - down : 24 - down, 12 - across : 24 - across]


def test_training_images_are_shifted_with_their_border_repeated(tmp_path: Path) -> None:
    path = str(packed(tmp_path, train=1))
    task = MaskedAutoencoder(path=path, size=12, patch=4, flip=False, shift=2)
    upright, shown = pictures(1)[0], seen(task, task.batch(400, Draw(0), "cpu")[1])
    places = [(down, across) for down in range(-2, 3) for across in range(-2, 3)]
    known = {moved(upright, *place).tobytes(): place for place in places}
    found = [known[image.tobytes()] for image in shown]
    # Of 25 places each is expected 16 times.
    assert min(found.count(place) for place in places) > 2
    again = seen(task, task.batch(400, Draw(0), "cpu")[1])
    assert np.array_equal(again, shown)
    assert not np.array_equal(seen(task, task.batch(400, Draw(0, 1), "cpu")[1]), shown)


def test_shifts_leave_flips_and_held_out_images_as_they_are(tmp_path: Path) -> None:
    path = str(packed(tmp_path, train=1))
    still, moving = (MaskedAutoencoder(path=path, size=12, patch=4, shift=most) for most in (0, 2))
    for stream in (SELECTION, TEST):
        draw = Draw(0, stream=stream)
        pairs = zip(still.batch(3, draw, "cpu"), moving.batch(3, draw, "cpu"), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    upright, flipped = pictures(1)[0], pictures(1)[0][:, ::-1]
    places = [(down, across) for down in range(-2, 3) for across in range(-2, 3)]
    before, after = (seen(task, task.batch(40, Draw(0), "cpu")[1]) for task in (still, moving))
    for one, other in zip(before, after, strict=True):
        source = upright if np.array_equal(one, upright) else flipped
        assert any(np.array_equal(other, moved(source, *place)) for place in places)


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
        patch.setattr(image_sources, "decode", None)
        assert np.array_equal(images.load(str(path), 12).parts["valid"], held.parts["valid"])
    images.load.cache_clear()
    pack(path, train=[encoded(p) for p in pictures(2)], valid=[encoded(pictures(1)[0])])
    assert len(images.load(str(path), 12).parts["train"]) == 2


@pytest.mark.parametrize("name", ["train.npy", "valid.npy", "about.json"])
@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:-1] + b"#"])
def test_a_damaged_cache_is_rebuilt(
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
    [warning] = caplog.messages
    assert warning.startswith(f"warning: cache '{cached.parent}' is damaged")


def test_several_processes_may_rebuild_a_cache_at_once(tmp_path: Path) -> None:
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
            assert images._read_cache(left), "the remaining cache is intact"


def _load_together(path: Path, together: Barrier) -> images.Images:
    together.wait()
    return images.load.__wrapped__(str(path), 12)


def test_a_new_cache_is_used_even_if_another_process_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = durable.rename

    def rename(old: Path, new: Path) -> None:
        inner(old, new)
        inner(new, tmp_path / "moved")  # as a process does that found a damaged cache

    path = packed(tmp_path)
    monkeypatch.setattr(durable, "rename", rename)
    assert np.array_equal(images.load(str(path), 12).parts["train"], pictures(5))


def test_a_folder_has_parts_or_is_split_by_name(tmp_path: Path) -> None:
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
    # A new file does not move others to another part.
    (tmp_path / "mixed" / "another.png").write_bytes(encoded(pictures(1, seed=9)[0]))
    images.load.cache_clear()
    later = {p.tobytes() for p in images.load(str(tmp_path / "mixed"), 12).parts["valid"]}
    assert held_out <= later


def test_celeba_is_cropped_and_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    face = np.zeros((218, 178, 3), dtype=np.uint8)
    face[20:198] = 200

    def load_dataset(name: str, split: str) -> list[dict[str, Image.Image]]:
        assert (name, split) in {("flwrlabs/celeba", "train"), ("flwrlabs/celeba", "valid")}
        return [{"image": Image.fromarray(face)}] * 2

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    images.load.cache_clear()
    assert (images.load("celeba", 12).parts["valid"] == 200).all()


def test_an_unreachable_celeba_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    images.load.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = error_of("celeba")
    assert "needs the package datasets: pip install 'gaugelasso[images]'" in message
    assert message.endswith("or give a packed .npz or a folder as task.path")

    def load_dataset(name: str, split: str) -> None:
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert "cannot be loaded (no route to the hub)" in error_of("celeba")


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
    message = error_of("celeba")
    assert "train image 1 of CelebA cannot be read (" in message
    assert "GAUGELASSO_CACHE" not in message


def test_a_missing_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "needs the package pillow" in error_of(path)


def test_invalid_image_sets_are_named(tmp_path: Path) -> None:
    good, small = encoded(pictures(1)[0]), encoded(pictures(1, size=8)[0])
    assert "no such file or folder" in error_of(tmp_path / "nowhere")
    assert "write the path in full" in error_of("~nobody-here/faces.npz")
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text.npz", "one.npy"):
        message = error_of(tmp_path / name)
        assert "not a readable .npz file (it is not a complete zip archive of arrays" in message
        assert "a packed file of images is an .npz with the arrays train_data" in message
    np.savez(tmp_path / "keys.npz", train_data=np.zeros(3, np.uint8))
    assert "has no array 'train_offsets'" in error_of(tmp_path / "keys.npz")
    np.savez(
        tmp_path / "fit.npz",
        **{f"{part}_data": np.zeros(3, np.uint8) for part in images.PARTS},
        **{f"{part}_offsets": np.array([0, 9]) for part in images.PARTS},
    )
    assert "train_offsets does not fit train_data" in error_of(tmp_path / "fit.npz")
    for numbers in ([0, 2, 1, 3], [0, 2, 2, 3], [-1, 3], []):
        fall = {f"{part}_offsets": np.array(numbers, np.int64) for part in images.PARTS}
        data = {f"{part}_data": np.zeros(3, np.uint8) for part in images.PARTS}
        np.savez(tmp_path / "fall.npz", **fall, **data)
        assert "offsets must increase" in error_of(tmp_path / "fall.npz")
    np.savez(tmp_path / "fall.npz", **fall, **{name: np.zeros(3) for name in data})
    assert "train_data must be a vector of uint8" in error_of(tmp_path / "fall.npz")
    for spoiled in (good[:-30], b"no image"):
        bad = pack(tmp_path / "bad.npz", train=[good, spoiled], valid=[good])
        message = error_of(bad)
        assert f"train image 1 of {str(bad)!r} is not a readable image (" in message
        assert message.endswith("; remove or replace it")
        assert "0x" not in message
    size = pack(tmp_path / "size.npz", train=[good], valid=[small])
    assert "valid image 0" in error_of(size)
    assert "is 8x8 pixels, but task.size = 12 expects 12x12" in error_of(size)
    assert "has no images for valid" in error_of(
        pack(tmp_path / "none.npz", train=[good], valid=[])
    )
    # No partial cache is left behind.
    assert list((tmp_path / "cache" / "images").iterdir()) == []


def test_a_folder_without_good_images_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "no images in this folder; add files that end in .bmp, .jpeg" in error_of(folder)
    (folder / "a.png").write_bytes(encoded(pictures(1)[0]))
    assert "too few images" in error_of(folder)
    for part in images.PARTS:
        (folder / part).mkdir()
        (folder / part / "b.png").write_bytes(encoded(pictures(1)[0])[:60])
    message = error_of(folder)
    assert f"{str(folder / 'train' / 'b.png')!r} is not a readable image" in message


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path)
    monkeypatch.setenv("GAUGELASSO_CACHE", str(path))
    assert "set GAUGELASSO_CACHE to a folder with free space" in error_of(path)


def test_a_path_may_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    "corrupt archive": (lambda p: cut_archive(p.with_suffix(".npz")), "not a complete zip archive"),
    "wrong size": (
        lambda p: bad_folder(p, encoded(pictures(1)[0])),
        "is 12x12 pixels, but task.size = 32 expects 32x32; resize the images",
    ),
    "no home": (lambda p: Path("~nobody-here"), "write the path in full"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_end_a_command_with_an_error_of_one_line(
    tmp_path: Path, gaugelasso: Command, name: str
) -> None:
    make, words = BAD[name]
    change = f"task.path={make(tmp_path / 'bad')}"
    run = tmp_path / "run"
    assert_user_error(
        gaugelasso("train", CONFIGS / "small.toml", "--out", run, "--set", change), words
    )
    assert not run.exists()
