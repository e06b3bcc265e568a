"""Settings: flag > DISTRIBAI_* > ./distribai.toml > user file > default; each knows its source.

The dataclasses of :mod:`distribai.sections` are the one list of settings. ``[section]`` and
``name`` in a TOML file are ``DISTRIBAI_SECTION_NAME`` in the environment; the client's two, which
people type most, are ``DISTRIBAI_URL`` and ``DISTRIBAI_TOKEN``. Unknown names are refused wherever
they stand, because a setting that silently does nothing is worse than an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribai.errors import UsageError
from distribai.sections import (
    BOUNDS,
    CHOICES,
    SECTIONS,
    ClientSettings,
    LimitSettings,
    LivenessSettings,
    LogSettings,
    NodeSettings,
    OrchestratorSettings,
    WebhookSettings,
)

PREFIX = "DISTRIBAI_"
ENV_ONLY = {
    "DISTRIBAI_HOME": "one directory for all state, configuration, caches and credentials",
    "DISTRIBAI_DEBUG": "1: tracebacks of errors, debug logs",
}
"""Variables that are no setting of a section, with what they do."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where this user's things lie: ``DISTRIBAI_HOME``, or the system's own places."""

    state: Path
    config_file: Path
    cache: Path

    @property
    def credentials(self) -> Path:
        """What ``orchestrator start`` leaves for the other commands of the same user."""
        return self.state / "credentials.json"

    @classmethod
    def find(cls, env: Mapping[str, str]) -> Home:
        """The home that ``env`` names, or the platform's."""
        if chosen := env.get("DISTRIBAI_HOME"):
            root = Path(chosen).expanduser().absolute()
            return cls(root / "state", root / "config.toml", root / "cache")
        import platformdirs

        places = platformdirs.PlatformDirs("distribai", appauthor=False)
        return cls(
            Path(places.user_state_dir),
            Path(places.user_config_dir) / "config.toml",
            Path(places.user_cache_dir),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it came from: a flag, a variable, a file, or ``default``."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Spot:
    """One known setting: its section, its type (read from text or TOML), its help."""

    name: str
    kind: type[Any]
    default: Any
    help: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        section, _, key = self.name.partition(".")
        return PREFIX + (key if section == "client" else f"{section}_{key}").upper()


def known(home: Home) -> Mapping[str, Spot]:
    """Every setting by dotted name; the defaults of the state directories depend on ``home``."""
    found: dict[str, Spot] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[item.name]):
                continue
            name = f"{section}.{item.name}"
            default = item.default
            if name == "orchestrator.state_dir":
                default = home.state / "orchestrator"
            elif name == "node.state_dir":
                default = Path()
            found[name] = Spot(name, hints[item.name], default, item.metadata["help"])
    return found


class Settings:
    """All settings of one invocation, resolved."""

    def __init__(self, home: Home, values: Mapping[str, Setting]) -> None:
        self.home = home
        self._values = values

    def __iter__(self) -> typing.Iterator[Setting]:
        return iter(self._values.values())

    def __getitem__(self, name: str) -> Setting:
        return self._values[name]

    def replaced(self, name: str, value: Any, source: str) -> Settings:
        """These settings with one value from elsewhere."""
        return Settings(self.home, {**self._values, name: Setting(name, value, source)})

    def orchestrator(self) -> OrchestratorSettings:
        """The settings of one orchestrator process."""
        section = self._section("orchestrator")
        return OrchestratorSettings(
            **section,
            liveness=LivenessSettings(**self._section("liveness")),
            webhooks=WebhookSettings(**self._section("webhooks")),
            limits=LimitSettings(**self._section("limits")),
        )

    def node(self) -> NodeSettings:
        """The settings of one node; an empty ``state_dir`` is ``Path()``: the caller picks one."""
        return NodeSettings(**self._section("node"))

    def logs(self) -> LogSettings:
        """How logs are written."""
        return LogSettings(**self._section("logs"))

    def client(self) -> ClientSettings:
        """Address and token."""
        return ClientSettings(**self._section("client"))

    def _section(self, section: str) -> dict[str, Any]:
        prefix = f"{section}."
        return {
            name.removeprefix(prefix): setting.value
            for name, setting in self._values.items()
            if name.startswith(prefix)
        }


def load(
    flags: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Resolve every setting.

    Args:
        flags: dotted name to value, from the command line; None values are flags not given.
        env: the environment (``os.environ``).
        directory: where ``distribai.toml`` is looked for (the working directory).

    Raises:
        UsageError: ``config.invalid``: an unknown name, an ill-typed or impossible value, or a file
            that is not TOML. The message names the source.
    """
    env = os.environ if env is None else env
    home = Home.find(env)
    spots = known(home)
    values = {name: Setting(name, spot.default, "default") for name, spot in spots.items()}
    local = (Path() if directory is None else directory) / "distribai.toml"
    for path in (home.config_file, local):
        for name, value in _read_file(path, spots).items():
            values[name] = Setting(name, value, str(path))
    for name, (value, variable) in _read_env(env, spots).items():
        values[name] = Setting(name, value, variable)
    for name, flag in (flags or {}).items():
        if flag is not None:
            source = "--" + name.partition(".")[2].replace("_", "-")
            values[name] = Setting(name, _check(spots[name], flag, source), source)
    return Settings(home, values)


def _read_file(path: Path, spots: Mapping[str, Spot]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError("config.invalid", f"{path} cannot be read: {problem}.") from problem
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise UsageError("config.invalid", f"{path} is not valid TOML: {problem}.") from problem
    found: dict[str, Any] = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            raise UsageError(
                "config.invalid",
                f"{path}: {section} stands outside of a section.",
                f"Sections are {', '.join(f'[{s}]' for s in SECTIONS)}.",
                field=section,
            )
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in spots:
                raise _unknown(name, list(spots), str(path))
            found[name] = _check(spots[name], value, str(path))
    return found


def _read_env(env: Mapping[str, str], spots: Mapping[str, Spot]) -> dict[str, tuple[Any, str]]:
    variables = {spot.variable: spot for spot in spots.values()}
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in ENV_ONLY or text == "":
            continue
        spot = variables.get(variable)
        if spot is None:
            raise _unknown(variable, [*variables, *ENV_ONLY], "the environment")
        found[spot.name] = (_check(spot, _from_text(spot, text), variable), variable)
    return found


def _from_text(spot: Spot, text: str) -> object:
    """What an environment variable's text means for a setting of its type; else the text."""
    if spot.kind is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        return words.get(text.strip().lower(), text)
    if spot.kind in (int, float):
        try:
            return spot.kind(text)
        except ValueError:
            return text
    return text


def _check(spot: Spot, value: object, source: str) -> Any:
    """``value`` in the setting's type and within its bounds.

    Raises:
        UsageError: it is not.
    """
    if spot.kind is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser().absolute()
    if spot.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not spot.kind:
        raise UsageError(
            "config.invalid",
            f"{spot.name} in {source} must be {_TYPES[spot.kind]}, not {value!r}.",
            field=spot.name,
        )
    if spot.name in CHOICES and value not in CHOICES[spot.name]:
        raise UsageError(
            "config.invalid",
            f"{spot.name} in {source} must be {' or '.join(CHOICES[spot.name])}, not {value!r}.",
            field=spot.name,
        )
    low, high = BOUNDS.get(spot.name, (float("-inf"), float("inf")))
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise UsageError(
            "config.invalid",
            f"{spot.name} in {source} must lie between {low:g} and {high:g}, not be {value:g}.",
            field=spot.name,
        )
    return value


_TYPES: Mapping[type[Any], str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}


def _unknown(name: str, names: list[str], source: str) -> UsageError:
    short = {n.removeprefix(PREFIX): n for n in names}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), list(short), n=1)
    return UsageError(
        "config.invalid",
        f"There is no setting {name} (in {source}).",
        f"Did you mean {short[near[0]]}?" if near else "`distribai config show` lists them all.",
        field=name,
    )
