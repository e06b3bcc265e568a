"""``distribai node``: let this machine contribute."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from distribai.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distribai import wishes
    from distribai.sections import NodeSettings

T = TypeVar("T")

JOIN_FILE = "join"
"""What tells a node's state directory from others: the grid's address."""

app = App(name="node", help="Let this machine contribute.")


@app.command
def start(
    *,
    join: Annotated[
        str | None,
        Parameter(help="The link that the orchestrator printed.  [default: the last one used]"),
    ] = None,
    name: Annotated[
        str | None, Parameter(help="What people see.  [default: the machine's name]")
    ] = None,
    device: Annotated[
        str | None, Parameter(help="cpu, mps, cuda, cuda:N.  [default: the best there is]")
    ] = None,
    threads: Annotated[int | None, Parameter(help="CPU threads.  [default: all cores]")] = None,
    share: Annotated[
        float | None, Parameter(help="Share of the device's time, up to 1.  [default: 1]")
    ] = None,
    up_mbps: Annotated[
        float | None, Parameter(help="Send at most so many Mbit/s; 0: no limit.  [default: 0]")
    ] = None,
    down_mbps: Annotated[
        float | None, Parameter(help="Fetch at most so many Mbit/s; 0: no limit.  [default: 0]")
    ] = None,
    month_gb: Annotated[
        float | None,
        Parameter(help="Move at most so many GB (10^9 bytes) a month; 0: no limit.  [default: 0]"),
    ] = None,
    cache_gb: Annotated[float | None, Parameter(help="Largest cache.  [default: 20]")] = None,
    state_dir: Annotated[
        Path | None,
        Parameter(help="Key and cache of this node.  [default: the first that is free]"),
    ] = None,
) -> int:
    """Run a node until it is interrupted.

    It works on whatever the grid gives it. Start as many on one machine as you like; each has a
    key of its own. The first Ctrl-C lets it finish the present step and leave in order, the second
    one leaves at once.
    """
    from distribai import config
    from distribai.cli.logs import configure, wants_debug

    settings = config.load(
        {
            "node.join": join,
            "node.name": name,
            "node.device": device,
            "node.threads": threads,
            "node.share": share,
            "node.up_mbps": up_mbps,
            "node.down_mbps": down_mbps,
            "node.month_bytes": _bytes("--month-gb", "node.month_bytes", month_gb, 10**9),
            "node.cache_bytes": _bytes("--cache-gb", "node.cache_bytes", cache_gb, 2**30),
            "node.state_dir": state_dir,
        }
    )
    configure(wants_debug(), settings.logs().format)
    for flag, amount in (
        ("--up-mbps", up_mbps),
        ("--down-mbps", down_mbps),
        ("--month-gb", month_gb),
    ):
        if amount == 0:
            output.note(f"{flag} 0 means: no limit. To let it rest: `distribai node pause`.")
    from distribai.node.main import run_node

    if settings.node().state_dir != Path():
        return run_node(settings.node())
    return in_first_free(settings.home.state / "nodes", settings.node(), run_node)


def _bytes(flag: str, setting: str, amount: float | None, unit: int) -> int | None:
    """``amount`` in bytes.

    Raises:
        UsageError: ``config.invalid``, in the flag's own unit.
    """
    if amount is None:
        return None
    from distribai.errors import UsageError
    from distribai.sections import BOUNDS

    low, high = BOUNDS[setting]
    if not low <= amount * unit <= high:
        raise UsageError(
            "config.invalid",
            f"{flag} must lie between {low / unit:.2g} and {high / unit:.2g}, not be {amount:g}.",
            field=setting,
        )
    return int(amount * unit)


StateDir = Annotated[
    Path | None,
    Parameter(help="Of one node.  [default: all nodes of this user on this machine]"),
]


@app.command
def status(*, state_dir: StateDir = None, as_json: output.Json = False) -> None:
    """Say what this machine's nodes have moved this month, and why they rest or are not connected.

    Also how fast each may use the line (`--up-mbps`, `--down-mbps`) and how fast it was measured
    to be. From what they keep on disk: a running node writes it every few seconds. One that has
    ended because of an error, as a ban, is said to have, until it is started again.
    """
    from distribai.core import contact

    found = [_status(path) for path in _joined(state_dir, JOIN_FILE, contact.FILE)]
    if as_json:
        output.document(found)
        return
    for told in found:
        output.data(told["state_dir"])
        output.data("\n".join(f"    {line}" for line in output.facts(_facts(told)).splitlines()))


def _status(state: Path) -> dict[str, Any]:
    """What one node keeps.

    Raises:
        Integrity: ``blob.hash``, its record is torn or changed.
    """
    from distribai import wishes
    from distribai.core import contact
    from distribai.core.plain import to_plain
    from distribai.core.traffic import FILE, Kept, within

    kept = _record(Kept, state / FILE) or Kept()
    return {
        "state_dir": str(state),
        "wish": wishes.read(state) or "contribute",
        "months": to_plain(kept.months),
        "month_bytes": kept.month_bytes,
        "up_mbps": kept.up_mbps,
        "down_mbps": kept.down_mbps,
        "measured_up_mbps": within(kept.up.mbps, kept.up_mbps),
        "measured_down_mbps": within(kept.down.mbps, kept.down_mbps),
        "why": kept.why,
        "trouble": to_plain(_record(contact.Trouble, state / contact.FILE)),
    }


def _record(kind: type[T], path: Path) -> T | None:
    """What a node keeps in a file; None: nothing.

    Raises:
        Integrity: ``blob.hash``, the record is torn or changed.
    """
    from distribai.core.plain import from_plain
    from distribai.core.sealed import unseal

    try:
        return from_plain(kind, unseal(path.read_bytes()))
    except FileNotFoundError:
        return None


def _facts(told: dict[str, Any]) -> list[tuple[str, str]]:
    limit = f" of {output.size(told['month_bytes'])}" if told["month_bytes"] else ""
    month, used = next(reversed(told["months"].items()), ("", 0))
    pairs = [
        ("wish", told["wish"]),
        (month, f"{output.size(used)} moved{limit}" if month else ""),
        ("limits of the line", _both_ways(told, "", "no limit")),
        ("measured", _both_ways(told, "measured_", "not yet known")),
        ("takes no tasks", told["why"]),
        *(_trouble(**told["trouble"]) if told["trouble"] else ()),
    ]
    return [(name, value) for name, value in pairs if value]


def _trouble(since: float, why: str, hint: str, code: str) -> Iterator[tuple[str, str]]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    if code:
        yield "has ended", f"{when}: {why} [{code}]"
    else:
        yield "not connected", f"since {when}: {why}"
    yield "try", hint


def _both_ways(told: dict[str, Any], kind: str, nothing: str) -> str:
    rates = {way: told[f"{kind}{way}_mbps"] for way in ("up", "down")}
    return ", ".join(
        f"{rate:.3g} Mbit/s {way}" if rate else f"{nothing} {way}" for way, rate in rates.items()
    )


@app.command
def pause(*, state_dir: StateDir = None) -> None:
    """Let this machine's nodes rest.

    They stand still before their next step and take no tasks, until `distribai node contribute`;
    also when they are started again meanwhile.
    """
    _wish("pause", state_dir)


@app.command
def contribute(*, state_dir: StateDir = None) -> None:
    """Let this machine's nodes work again after a pause."""
    _wish("contribute", state_dir)


@app.command
def finish(*, state_dir: StateDir = None) -> None:
    """Let this machine's nodes finish what they have, report it and leave."""
    _wish("finish", state_dir)


def _wish(wish: wishes.Wish, state_dir: Path | None) -> None:
    """Leave word for the nodes of this machine.

    Raises:
        UsageError: ``node.join``: there is no node here.
    """
    from distribai import wishes

    for path in _joined(state_dir, JOIN_FILE):
        wishes.leave(path, wish)
        output.data(f"{path}: {wish}")


def _joined(state_dir: Path | None, *marks: str) -> list[Path]:
    """The state directories of this machine's nodes, or the one that is named: those in which one
    of the files ``marks`` lies.

    Raises:
        UsageError: ``node.join``: there is no node here.
    """
    from distribai import config
    from distribai.errors import UsageError

    settings = config.load({"node.state_dir": state_dir})
    if settings.node().state_dir != Path():
        found = [settings.node().state_dir]
    else:
        found = sorted((settings.home.state / "nodes").glob("*"))
    found = [path for path in found if any((path / mark).is_file() for mark in marks)]
    if not found:
        raise UsageError(
            "node.join",
            f"No node has joined a grid from {settings.node().state_dir}."
            if settings.node().state_dir != Path()
            else "No node of this machine has joined a grid from its usual place.",
            "Start one: distribai node start --join LINK. Of a node with a state directory of its "
            "own: --state-dir DIRECTORY.",
            field="state_dir",
        )
    return found


def in_first_free(root: Path, settings: NodeSettings, run: Callable[[NodeSettings], int]) -> int:
    """Run in the first of ``root/1``, ``root/2``, ... that no other node of this machine holds.

    The node itself locks its directory first of all, so trying is the test.
    """
    from distribai.errors import Conflict

    for number in itertools.count(1):
        try:
            return run(dataclasses.replace(settings, state_dir=root / str(number)))
        except Conflict as problem:
            if problem.code != "node.locked":
                raise
    raise AssertionError("counting ended")
