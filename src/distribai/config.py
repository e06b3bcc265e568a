"""Settings: flag > DISTRIBAI_* > ./distribai.toml > user file > default; each knows its source.

The dataclasses below are the one list of settings: name, type, default and help. ``[section]`` and
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distribai.errors import UsageError

T = TypeVar("T")

PREFIX = "DISTRIBAI_"
ENV_ONLY = {
    "DISTRIBAI_HOME": "one directory for all state, configuration, caches and credentials",
    "DISTRIBAI_DEBUG": "1: tracebacks of errors, debug logs",
}
"""Variables that are no setting of a section, with what they do."""


def _help(default: T, text: str) -> T:
    """A dataclass field with its help; what type checkers see is its default."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Seconds of silence and of patience, all on database time."""

    heartbeat_s: float = _help(10.0, "seconds between a node's heartbeats")
    degraded_s: float = _help(30.0, "silence after which a node counts as degraded")
    offline_s: float = _help(50.0, "silence after which a node counts as offline")
    startup_grace_s: float = _help(60.0, "after a start no lease expires for so long")
    tick_s: float = _help(5.0, "the duties look for work at least so often")
    task_deadline_s: float = _help(3600.0, "a task's lease ends after so long at the latest")


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """What webhooks may do. Without ``allow_private`` they reach public addresses only, on ports 80
    and 443; a grid that strangers can talk to should stay like that."""

    allow_private: bool = _help(
        False, "let webhooks go to private and loopback addresses too, on any port"
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """How often one may ask: per second over a long time, and at once after a pause (``burst``). 0
    per second means no limit. A network is an IPv4 /24 or an IPv6 /48; this machine itself is none.
    """

    anonymous_per_s: float = _help(50.0, "requests of a network that bring no proven credentials")
    anonymous_burst: float = _help(1000.0, "of these, at once")
    network_per_s: float = _help(2000.0, "requests of a network with proven credentials")
    network_burst: float = _help(20_000.0, "of these, at once")
    owner_per_s: float = _help(400.0, "requests of one account or node")
    owner_burst: float = _help(4000.0, "of these, at once")
    key_per_s: float = _help(200.0, "requests with one key or token")
    key_burst: float = _help(2000.0, "of these, at once")
    joins_per_s: float = _help(50.0, "new streams of nodes from one network")
    joins_burst: float = _help(2000.0, "of these, at once")
    messages_per_s: float = _help(50.0, "messages on one node's stream; above it it is read slower")
    messages_burst: float = _help(1000.0, "of these, at once")


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """One orchestrator process.

    ``db`` is a SQLAlchemy URL; empty means ``<state_dir>/grid.sqlite3``. ``blobs`` is a directory
    or an object-store URL; empty means ``<state_dir>/blobs``. Port 0 takes any free port. Beyond
    loopback TLS is the default: with the grid's own CA, which lies in ``keys``, or with the
    certificate in ``tls_cert`` and ``tls_key``. How to choose: docs/how-to/secure.md.
    """

    state_dir: Path = field(metadata={"help": "where the database, blobs and keys lie"})
    host: str = _help("127.0.0.1", "address to listen on")
    grpc_port: int = _help(50051, "port of the nodes' stream; 0 takes any free one")
    http_port: int = _help(8766, "port of the HTTP interface; 0 takes any free one")
    db: str = _help("", "SQLAlchemy URL; empty: SQLite in the state directory")
    blobs: str = _help("", "directory or s3://bucket/prefix; empty: in the state directory")
    tls: bool = _help(False, "TLS on loopback as well; beyond it, it is the default")
    insecure: bool = _help(
        False, "no TLS beyond loopback: a proxy has it, or the network is trusted"
    )
    tls_cert: str = _help(
        "", "your own certificate, a chain in PEM; empty: the grid's CA signs one"
    )
    tls_key: str = _help("", "the private key of tls_cert, in PEM")
    keys: str = _help("", "directory of the grid's CA, the same for all replicas; empty: state_dir")
    public_grpc: str = _help("", "host:port by which nodes reach the stream; empty: as bound")
    public_http: str = _help("", "host:port by which others reach HTTP; empty: as bound")
    public_tls: bool = _help(False, "a proxy with a publicly trusted certificate stands in front")
    proxies: str = _help("127.0.0.1", "addresses whose X-Forwarded-For is believed; with commas")
    mode: str = _help("", "trusted or open; empty: as it is, at the first start trusted")
    open_metrics: bool = _help(False, "let anybody read /metrics; else an operator's key does")
    max_parameters: int = _help(2_000_000_000, "largest model that a job may ask for")
    max_blob_bytes: int = _help(64 * 2**30, "largest single upload, in bytes")
    merge_threads: int = _help(0, "threads of the merge; 0: all cores")
    orphans_s: float = _help(
        172800.0, "a blob that nothing names is deleted after so many seconds; 0: never"
    )
    liveness: LivenessSettings = LivenessSettings()
    webhooks: WebhookSettings = WebhookSettings()
    limits: LimitSettings = LimitSettings()

    @property
    def database_file(self) -> Path:
        """Where the database lies unless ``db`` says otherwise."""
        return self.state_dir / "grid.sqlite3"

    @property
    def database_url(self) -> str:
        """The database's SQLAlchemy URL."""
        return self.db or f"sqlite:///{self.database_file}"

    @property
    def blob_place(self) -> str | Path:
        """The blobs' directory or object-store URL."""
        return self.blobs or self.state_dir / "blobs"


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node daemon. ``threads`` 0 means all cores; ``device`` ``auto`` takes the best one."""

    state_dir: Path = field(metadata={"help": "key and cache of this node; empty: a free one"})
    join: str = _help("", "the grid's join link")
    name: str = _help("", "what people see; empty: the machine's name")
    device: str = _help("auto", "auto, cpu, mps, cuda or cuda:N")
    threads: int = _help(0, "CPU threads for training; 0: all cores")
    cache_bytes: int = _help(20 * 2**30, "largest cache of blobs, in bytes")
    share: float = _help(1.0, "share of the device's time that training may take")
    progress_s: float = _help(2.0, "seconds between progress reports at least")
    checkpoint_s: float = _help(
        15.0, "seconds between two checkpoints of a running task at least; 0: none"
    )
    checkpoint_bytes: int = _help(16 * 2**30, "largest checkpoint of a running task, in bytes")
    benchmark: bool = _help(True, "measure the devices' speed at a quiet moment, for the scheduler")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What orchestrator and node write to stderr. ``format`` ``auto`` is ``console``, sentences for
    people, on a terminal, and ``json``, one document a line, elsewhere."""

    format: str = _help("auto", "auto, console or json")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the command line finds the orchestrator, and as whom it speaks."""

    url: str = _help("http://127.0.0.1:8766", "address of the orchestrator's HTTP interface")
    token: str = _help("", "a key; empty: what `login` or `orchestrator start` left")
    ca: str = _help(
        "", "the grid's CA: a file in PEM, or its SHA-256; empty: the authorities of the system"
    )


SECTIONS: Mapping[str, type[Any]] = {
    "client": ClientSettings,
    "orchestrator": OrchestratorSettings,
    "node": NodeSettings,
    "liveness": LivenessSettings,
    "webhooks": WebhookSettings,
    "limits": LimitSettings,
    "logs": LogSettings,
}

BOUNDS: Mapping[str, tuple[float, float]] = {
    "orchestrator.grpc_port": (0, 65535),
    "orchestrator.http_port": (0, 65535),
    "orchestrator.max_parameters": (1, 10**13),
    "orchestrator.max_blob_bytes": (1, 2**50),
    "orchestrator.merge_threads": (0, 4096),
    "node.threads": (0, 4096),
    "node.cache_bytes": (2**20, 2**60),
    "node.share": (0.01, 1.0),
    "node.progress_s": (0.0, 3600.0),
    "node.checkpoint_s": (0.0, 86400.0),
    "node.checkpoint_bytes": (0, 2**60),
    "orchestrator.orphans_s": (0.0, 10**9),
    "liveness.heartbeat_s": (0.05, 3600.0),
    "liveness.degraded_s": (0.1, 86400.0),
    "liveness.offline_s": (0.1, 86400.0),
    "liveness.startup_grace_s": (0.0, 86400.0),
    "liveness.tick_s": (0.05, 3600.0),
    "liveness.task_deadline_s": (1.0, 10**7),
    **{
        f"limits.{field.name}": (1.0, 10**9) if field.name.endswith("_burst") else (0.0, 10**9)
        for field in dataclasses.fields(LimitSettings)
    },
}
"""Smallest and largest value of every numeric setting."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "logs.format": ("auto", "console", "json"),
    "orchestrator.mode": ("", "trusted", "open"),
}
"""The values of settings that take some words only."""


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
