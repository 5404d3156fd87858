"""Objects of the user's own files: found by name, and every mistake is named."""

import sys
from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.plugins import load_module, load_object


def test_an_object_of_a_file_and_of_a_module(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    (tmp_path / "neighbour.py").write_text("value = 3\n")
    path.write_text("from neighbour import value\ndef build():\n    return value\n")
    assert load_object(f"{path}:build")() == 3
    assert load_object(f"{path}:build") is load_object(f"{path}:build")
    assert str(tmp_path) not in sys.path
    assert load_object("gaugelasso.plugins:load_object") is load_object
    sys.modules.pop("neighbour")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my.py").write_text(f"here = {name!r}\n")
    assert load_object(f"{tmp_path}/one/my.py:here") == "one"
    assert load_object(f"{tmp_path}/two/my.py:here") == "two"


@pytest.mark.parametrize("name", ["my.py", ":build", "my.py:", ""])
def test_a_name_without_both_parts(name: str) -> None:
    with pytest.raises(UserError, match=r"does not name an object: write it as 'my\.py:build'"):
        load_object(name)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("one = 1\nraise RuntimeError('no data')\n")
    with pytest.raises(UserError, match=r"bad\.py' cannot be imported: RuntimeError: no data"):
        load_object(f"{path}:one")
    path.write_text("import gone_missing\n")
    with pytest.raises(UserError, match="cannot be imported: No module named 'gone_missing'"):
        load_module(str(path))
    with pytest.raises(UserError, match=r"there is no file '.*absent\.py'"):
        load_object(f"{tmp_path}/absent.py:build")
    with pytest.raises(UserError, match=r"there is no module 'gaugelasso\.absent'"):
        load_object("gaugelasso.absent:build")
    path.write_text("one = 1\n")
    with pytest.raises(UserError, match="defines no 'two'; it defines one"):
        load_object(f"{path}:two")
