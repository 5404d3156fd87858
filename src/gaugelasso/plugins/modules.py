"""References to code: "file.py:Name" or "package.module:Name".

A config that the user passes to a command may name any file. A run folder may come from somebody
else, so it only names code and never brings it: a file in the run folder is not imported, and
an import that a run folder asks for is logged.
"""

import difflib
import hashlib
import importlib
import importlib.util
import logging
import operator
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.untrusted import read_plain

_log = logging.getLogger(__name__)
_PREFIX = "gaugelasso_module_"
_LARGEST_FILE = 2**24
# The file or module that is being imported here; another thread may train meanwhile.
_importing: ContextVar[str | None] = ContextVar("_importing", default=None)


@dataclass(frozen=True)
class NamedBy:
    """Who names a module: relative paths start from `folder`; `run` is set for a run folder."""

    folder: Path
    run: Path | None = None


@dataclass(frozen=True)
class Reference:
    """A name in a Python file (absolute path) or in a module (dotted name).

    `key` is what names it, as in "task.module", for error messages.
    """

    key: str
    source: str
    name: str

    @classmethod
    def parse(cls, key: str, text: Any, by: NamedBy) -> "Reference":
        """Read "file.py:Name" or "package.module:Name"; UserError if it is neither."""
        source, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        parts = (
            name.split(".") if source.endswith(".py") else [*source.split("."), *name.split(".")]
        )
        if not colon or not all(part.isidentifier() for part in parts):
            raise UserError(f'{key} = {text!r}: write "file.py:Name" or "package.module:Name"')
        if source.endswith(".py"):
            source = _absolute(key, text, Path(source), by)
        return cls(key, source, name)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"

    def load(self, by: NamedBy) -> Any:
        """The named object. Code that this process has imported already is not run again."""
        module = self._imported() or self._import(by)
        try:
            return operator.attrgetter(self.name)(module)
        except AttributeError:
            public = [name for name in vars(module) if not name.startswith("_")]
            near = difflib.get_close_matches(self.name, public, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "define it there"
            raise self.error(f"{self.source!r} has no {self.name!r}; {hint}") from None

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.key} = {str(self)!r}: {problem}")

    @property
    def _is_file(self) -> bool:
        return self.source.endswith(".py")

    def _imported(self) -> ModuleType | None:
        if not self._is_file:
            return sys.modules.get(self.source)
        same_name, name = None, os.path.basename(self.source)
        for module in list(sys.modules.values()):
            # First: of hundreds of modules few have the name, and paths take long to resolve.
            if os.path.basename(_stated_file(module) or "") != name:
                continue
            if _file(module) == self.source:
                return module
            if self._is_in(module):
                same_name = module
        # A file that has moved is found if the user has imported it from its new place.
        return None if os.path.exists(self.source) else same_name

    def _is_in(self, module: ModuleType) -> bool:
        return self.name.split(".")[0] in vars(module)

    def _import(self, by: NamedBy) -> ModuleType:
        if self._is_file:
            self._check_file(by)
        if by.run is not None:
            _log.warning("importing %r, which the run %r names", self.source, str(by.run))
        try:
            with _marked(self.source):
                path = Path(self.source)
                return _run_file(path) if self._is_file else _import_module(self.source)
        except (Exception, SystemExit) as error:
            where = _line(error, self.source)
            raise self.error(
                f"importing {self.source!r} raised {type(error).__name__}: "
                f"{first_line(error)}{where}"
            ) from error

    def _check_file(self, by: NamedBy) -> None:
        path = Path(self.source)
        if by.run is not None and path.resolve().is_relative_to(by.run.resolve()):
            raise self.error(
                "the file is inside the run folder, and code that comes with a run folder is not "
                f"imported; read it, put it elsewhere, and {self._remedy()}"
            )
        if not path.is_file():
            moved = f"; if it has moved, {self._remedy()}" if by.run is not None else ""
            raise self.error(f"no such file{moved}")

    def _remedy(self) -> str:
        key = self.key if "." in self.key else "model.module"
        return f"name its place with --set {key}=FILE.py:NAME, in config.json, or import it first"


@contextmanager
def _marked(source: str) -> Iterator[None]:
    token = _importing.set(source)
    try:
        yield
    finally:
        _importing.reset(token)


def check_may_train() -> None:
    """UserError while code is imported for what it defines: that must not train, or write a run."""
    if (source := _importing.get()) is not None:
        raise UserError(
            f"{source!r} is imported for what it defines, and would train: put what trains under "
            'if __name__ == "__main__"'
        )


def class_reference(cls: type) -> str | None:
    """Where a class can be imported from, as a reference; None for one inside a function.

    A module of a package is named by its dotted name, any other by its file.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or "<" in cls.__qualname__:
        return None
    package, dot, _ = cls.__module__.partition(".")
    if dot and PathFinder.find_spec(package) is not None:
        return f"{cls.__module__}:{cls.__qualname__}"
    file = _file(module)
    return f"{file}:{cls.__qualname__}" if file and file.endswith(".py") else None


def source_digest(thing: Any) -> str | None:
    """SHA-256 of the file that defines a class or function; None if there is no such file."""
    name = getattr(thing, "__module__", None) or type(thing).__module__
    module = sys.modules.get(name)
    file = _file(module) if module is not None else None
    try:
        return hashlib.sha256(read_plain(Path(file), _LARGEST_FILE)).hexdigest() if file else None
    except (OSError, ValueError):
        return None


def _absolute(key: str, text: str, path: Path, by: NamedBy) -> str:
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UserError(
            f"{key} = {text!r}: there is no home folder for this user name; write the path in full"
        ) from None
    if by.run is not None and not path.is_absolute():
        raise UserError(f"{key} = {text!r}: a run folder must name a file by its absolute path")
    path = by.folder.absolute() / path
    return str(path.parent.resolve() / path.name)


def _stated_file(module: ModuleType) -> str | None:
    """The path that a module gives for its file, as it is."""
    # Lazy modules would run code for a plain attribute access.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else None


def _file(module: ModuleType) -> str | None:
    """The absolute path of a module's file, without symbolic links in its folder."""
    file = _stated_file(module)
    if file is None:
        return None
    folder, name = os.path.split(os.path.abspath(file))
    return os.path.join(os.path.realpath(folder), name)


def _run_file(path: Path) -> ModuleType:
    name = f"{_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    # So that the file can import those beside it. Last, so that they shadow no other module.
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _line(error: BaseException, file: str) -> str:
    """The last line of the file that an error passed through, for the message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == file]  # fmt: skip
    return f" (line {lines[-1]})" if lines else ""
