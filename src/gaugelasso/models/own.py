"""A network of the user: built by a callable that a config names, rebuilt from its structure."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from gaugelasso.axes import Compressible
from gaugelasso.errors import UserError, first_line
from gaugelasso.files.typed import check_keys_known, is_config_type, typed
from gaugelasso.plugins import NamedBy, Reference, find_entry_point, installed_names

GROUP = "gaugelasso.models"
BUILT_IN = "transformer"
_PLAIN = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """[model] with `module`, or with the `name` of an entry point, and arguments of a callable."""

    key: Literal["name", "module"]
    value: str
    builder: Callable[..., Any]
    arguments: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The section as a config has it."""
        return {self.key: self.value, **self.arguments}

    def build(self, task: Any, seed: int) -> Compressible:
        """Call the builder, with torch's generator at `seed`; UserError if it fails."""
        arguments = dict(self.arguments)
        if "task" in _parameters(self.builder):
            arguments["task"] = task
        torch.manual_seed(seed)
        try:
            model = self.builder(**arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._title} raised {type(error).__name__}: {first_line(error)}"
            ) from error
        if not isinstance(model, Compressible):
            raise UserError(
                f"{self._title} returned {type(model).__name__}; it must return a "
                "gaugelasso.Compressible (docs/how-to/own-model.md)"
            )
        return model

    @property
    def _title(self) -> str:
        return f"model.{self.key} = {self.value!r}"


def find_model(section: Any, by: NamedBy) -> OwnModel | None:
    """The model that a [model] section names; None if that is the built-in transformer."""
    if not isinstance(section, Mapping) or not section.keys() & {"module", "name"}:
        return None
    if {"module", "name"} <= section.keys():
        raise UserError("model.name and model.module exclude each other; give only one of them")
    arguments = {key: value for key, value in section.items() if key not in ("module", "name")}
    if "module" in section:
        reference = Reference.parse("model.module", section["module"], by)
        return _own("module", str(reference), reference.load(by), arguments)
    name = section["name"]
    if name == BUILT_IN:
        return None
    builder = find_entry_point("model.name", GROUP, name) if isinstance(name, str) else None
    if builder is None:
        known = ", ".join([BUILT_IN, *installed_names(GROUP)])
        raise UserError(
            f"model.name = {name!r} is unknown; choose one of: {known}; or set model.module"
        )
    return _own("name", name, builder, arguments)


def _own(
    key: Literal["name", "module"], value: str, builder: Any, arguments: dict[str, Any]
) -> OwnModel:
    """Check the arguments against the builder's signature, and add its defaults."""
    title = f"model.{key} = {value!r}"
    if not callable(builder):
        raise UserError(
            f"{title} is {builder!r}; it must be a class or function that builds a model"
        )
    if isinstance(builder, type) and not issubclass(builder, Compressible):
        raise UserError(
            f"{title} is a class that does not derive from gaugelasso.Compressible "
            "(docs/how-to/own-model.md)"
        )
    parameters = _parameters(builder)
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if name != "task"
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_keys_known("model", arguments, [key, *named])
    for name, parameter in named.items():
        if name in arguments:
            if is_config_type(parameter.annotation):
                key_name = f"model.{name}"
                arguments[name] = typed(key_name, arguments[name], parameter.annotation)
        elif parameter.default is parameter.empty:
            raise UserError(f"model.{name} is missing; {value!r} needs it")
        elif type(parameter.default) in _PLAIN:
            arguments[name] = parameter.default
    return OwnModel(key, value, builder, arguments)


def _parameters(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of the builder, with annotations evaluated as far as they can be."""
    try:
        return inspect.signature(builder, eval_str=True).parameters
    except NameError:
        return inspect.signature(builder).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
