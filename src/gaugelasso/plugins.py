"""Objects of the user's own files and packages by name: "my.py:build", "package.module:build".

Importing runs the user's code. Nothing else here does.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gaugelasso.errors import UserError, first_line

_EXAMPLE = "write it as 'my.py:build' or 'package.module:build'"


def load_object(name: str) -> Any:
    """The object that "path.py:name" or "package.module:name" refers to; UserError if none."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise UserError(f"{name!r} does not name an object: {_EXAMPLE}")
    module = load_module(source)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(
            f"{source!r} defines no {attribute!r}; it defines {', '.join(public[:12]) or 'nothing'}"
        ) from None


def load_module(source: str) -> ModuleType:
    """A module by the path of its file, or by its dotted name; UserError if it cannot be loaded."""
    try:
        if source.endswith(".py"):
            return _load_file(Path(source))
        return importlib.import_module(source)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise UserError(f"there is no module {source!r}: {_EXAMPLE}") from None
        raise UserError(f"{source!r} cannot be imported: {first_line(error)}") from error
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"{source!r} cannot be imported: {kind}: {first_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: {_EXAMPLE}")
    path = path.resolve()
    # The full path in the name: two files called my.py are two modules.
    name = f"gaugelasso_plugin_{abs(hash(path)):x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    folder = str(path.parent)
    sys.path.insert(0, folder)  # a file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module
