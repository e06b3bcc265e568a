"""Model families: one file each, found by scanning this package.

A family's module offers ``NAME: str``, ``Config`` (a frozen dataclass whose fields are the
family's knobs), ``PROFILES: Mapping[str, Config]``, ``check(config)`` (raises
:class:`~distribai.errors.InvalidSpec`), ``manifest(config) -> ParameterManifest``,
``parameters(config) -> int`` (trainable ones, counted without building a manifest, so that an
absurd size is refused rather than built) and ``activation_bytes(config, sequences, seq_len) ->
int`` (an estimate of what the backward pass keeps). Its torch half is the module of the same name
in ``distribai.training.models``.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from distribai.core.plain import Plain, from_plain
from distribai.core.scan import modules
from distribai.core.tensors import ParameterManifest
from distribai.errors import InvalidSpec


@cache
def families() -> dict[str, ModuleType]:
    """Every model family by name."""
    return {module.NAME: module for module in modules(__name__)}


def family(name: str) -> ModuleType:
    """The module of one family.

    Raises:
        InvalidSpec: no such family.
    """
    try:
        return families()[name]
    except KeyError:
        raise InvalidSpec(
            "spec.model",
            f"There is no model family {name!r}.",
            f"Families: {', '.join(families())}.",
            field="model.family",
        ) from None


def config_from(name: str, plain: Plain) -> object:
    """A checked configuration of family ``name`` from plain JSON.

    Raises:
        InvalidSpec: an unknown, ill-typed, unused or impossible knob.
    """
    module = family(name)
    try:
        config = from_plain(module.Config, plain)
    except ValueError as problem:
        raise InvalidSpec(
            "spec.model",
            f"The architecture of family {name!r} cannot be read: {problem}.",
            "See the reference of model families for its knobs.",
            field="model.architecture_config",
        ) from None
    module.check(config)
    return config


def manifest_of(name: str, plain: Plain) -> ParameterManifest:
    """The parameter manifest of family ``name`` with the knobs ``plain``.

    Raises:
        InvalidSpec: see :func:`config_from`.
    """
    return family(name).manifest(config_from(name, plain))  # type: ignore[no-any-return]
