"""Keeps the old paths of documented modules importable.

The old name and the new name give the same module. It is imported only on use.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "gaugelasso.checkpoint": "gaugelasso.runs.checkpoint",
    "gaugelasso.compressor": "gaugelasso.compress.compressor",
    "gaugelasso.display": "gaugelasso.cli.display",
    "gaugelasso.drop": "gaugelasso.compress.drop",
    "gaugelasso.gauge": "gaugelasso.compress.gauge",
    "gaugelasso.guard": "gaugelasso.compress.guard",
    "gaugelasso.optim": "gaugelasso.compress.optim",
    "gaugelasso.options": "gaugelasso.compress.options",
    "gaugelasso.penalty": "gaugelasso.compress.penalty",
    "gaugelasso.pricing": "gaugelasso.compress.pricing",
    "gaugelasso.ranks": "gaugelasso.distributed",
    "gaugelasso.schedule": "gaugelasso.training.schedule",
    "gaugelasso.solver": "gaugelasso.compress.solver",
    "gaugelasso.split": "gaugelasso.compress.split",
    "gaugelasso.step": "gaugelasso.training.step",
    "gaugelasso.surgery": "gaugelasso.compress.surgery",
    "gaugelasso.tasks.streams": "gaugelasso.tasks.protocol",
    "gaugelasso.trainer": "gaugelasso.training.trainer",
}


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # This finder comes last, so an existing module of that name has priority.
        return spec_from_loader(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        # Python returns the entry of sys.modules as the imported module.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install() -> None:
    """Make the old paths importable; further calls have no effect."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
