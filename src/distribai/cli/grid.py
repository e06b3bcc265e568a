"""``distribai grid``: keys, invites and policies; save a whole grid, and bring it back."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import audit, invites, keys, output, rules

if TYPE_CHECKING:
    from distribai.config import Settings
    from distribai.orchestrator.backup import BackupManifest, Progress

app = App(name="grid", help="Keys, invites, policies, the audit feed; save a grid and restore it.")
app.command(keys.app)
app.command(invites.app)
app.command(rules.policy)
app.command(rules.quota)
app.command(audit.audit)

LINE_S = 10.0
"""Seconds between lines of progress where nobody watches a terminal."""


@Parameter(name="*")
@dataclass(frozen=True)
class Place:
    """Where the grid is, as ``orchestrator start`` is told."""

    state_dir: Annotated[Path | None, Parameter(help="The orchestrator's state directory.")] = None
    db: Annotated[
        str | None, Parameter(help="SQLAlchemy URL.  [default: SQLite in the state directory]")
    ] = None
    blobs: Annotated[
        str | None,
        Parameter(help="Directory or s3://bucket/prefix.  [default: in the state directory]"),
    ] = None

    def settings(self) -> Settings:
        """All settings, with these."""
        from distribai import config

        return config.load(
            {
                "orchestrator.state_dir": self.state_dir,
                "orchestrator.db": self.db,
                "orchestrator.blobs": self.blobs,
            }
        )


@app.command
def backup(
    out_dir: Annotated[Path, Parameter(help="Where to; an earlier backup is brought up to date.")],
    /,
    *,
    place: Place | None = None,
    incomplete: Annotated[
        bool,
        Parameter(show_default=False, help="Finish even if the grid has lost blobs of its own."),
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Save the grid of this machine into a directory, while it runs or stands still.

    Everything is in it: jobs, versions, blobs, nodes, credentials. Again into the same directory it
    copies only what is new; interrupted it can be run again. Whoever can read the directory can
    operate the grid.
    """
    import asyncio

    settings = (place or Place()).settings()
    from distribai.orchestrator.backup import back_up

    with _Line() as line:
        saved = asyncio.run(
            back_up(
                settings.orchestrator(),
                out_dir,
                secrets=_operator_token(settings),
                incomplete=incomplete,
                told=line.told,
            )
        )
    copied = saved.copied
    if as_json:
        output.document(
            {
                **_figures(saved.manifest),
                "copied_blobs": copied.blobs,
                "copied_bytes": copied.bytes,
                "lost": list(saved.manifest.lost),
            }
        )
        return
    output.data(
        f"{_words(saved.manifest)} saved in {out_dir}; "
        f"{output.plural(copied.blobs, 'blob')} ({output.size(copied.bytes)}) copied now."
    )
    for sha256, why in sorted(copied.lost.items()):
        output.note(f"lost: {sha256} ({why})")


@app.command
def restore(
    backup_dir: Annotated[Path, Parameter(help="What `distribai grid backup` has written.")],
    /,
    *,
    place: Place | None = None,
    check: Annotated[
        bool,
        Parameter(show_default=False, help="Only check that the backup is whole; write nothing."),
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Bring a grid back from a backup, where no grid is yet.

    Everything is checked by its hash first. The database and the blobs may be of another kind than
    before: this is also how a grid moves to PostgreSQL, to S3, or to another machine. Afterwards
    start the orchestrator on it; never run the old one beside it.
    """
    import asyncio

    settings = (place or Place()).settings().orchestrator()
    from distribai.orchestrator.backup import check_backup, restore

    with _Line() as line:
        if check:
            manifest = asyncio.run(check_backup(backup_dir, line.told))
        else:
            manifest = asyncio.run(restore(settings, backup_dir, told=line.told)).manifest
    if as_json:
        output.document({**_figures(manifest), "lost": list(manifest.lost)})
        return
    if check:
        output.data(f"The backup is whole: {_words(manifest)}.")
    else:
        output.data(f"{_words(manifest)} restored.")
        output.data(
            "Start it with `distribai orchestrator start` and the same --state-dir, --db and "
            "--blobs. Nodes need its new join link only if its address has changed."
        )
    for sha256 in manifest.lost:
        output.note(f"lost before the backup: {sha256}")


@app.command
def orphans(*, place: Place | None = None, as_json: output.Json = False) -> None:
    """Show the blobs that nothing names, and that the orchestrator will delete.

    It looks for them every hour, and takes those that were put longer ago than
    `orchestrator.orphans_s` says. Versions, accepted work and data are always named.
    """
    import asyncio

    settings = (place or Place()).settings().orchestrator()
    from distribai.orchestrator.retention import find_orphans

    found = asyncio.run(find_orphans(settings))
    if as_json:
        output.document(
            [
                {"sha256": b.ref.sha256, "size": b.ref.size, "put_at": b.put_at.timestamp()}
                for b in found
            ]
        )
        return
    for blob in found:
        output.data(
            f"{blob.ref.sha256}  {output.size(blob.ref.size)}  {blob.put_at:%Y-%m-%d %H:%M}"
        )
    total = sum(b.ref.size for b in found)
    output.note(f"{output.plural(len(found), 'blob')} ({output.size(total)}) that nothing names")


def _operator_token(settings: Settings) -> dict[str, str]:
    """The token that ``orchestrator start`` left for the commands, if it is this grid's: a restored
    grid tells it at its first start, or nobody could operate it on another machine."""
    from distribai.cli.connection import read_credentials

    found = read_credentials(settings.home)
    if found is None or found.state_dir != str(settings.orchestrator().state_dir):
        return {}
    return {"operator-token": f"{found.token}\n"}


def _figures(manifest: BackupManifest) -> dict[str, object]:
    return {
        "grid_id": manifest.grid_id,
        "software": manifest.software,
        "revision": manifest.revision,
        "taken_at": manifest.taken_at,
        "rows": sum(part.lines for part in manifest.tables.values()),
        "jobs": manifest.tables["jobs"].lines,
        "versions": manifest.tables["versions"].lines,
        "blobs": manifest.blobs.lines,
        "blob_bytes": manifest.blob_bytes,
    }


def _words(manifest: BackupManifest) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.taken_at))
    return (
        f"The grid {manifest.grid_id} as of {when} "
        f"({output.plural(manifest.tables['jobs'].lines, 'job')}, "
        f"{output.plural(manifest.tables['versions'].lines, 'version')}, "
        f"{output.plural(manifest.blobs.lines, 'blob')}, {output.size(manifest.blob_bytes)})"
    )


class _Line:
    """Progress on stderr: one line that changes on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._live else LINE_S)
        self._open = False

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            sys.stderr.write("\n")

    def told(self, progress: Progress) -> None:
        """How far it is."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.2 if self._live else LINE_S)
        if progress.what == "rows":
            text = f"rows: {progress.done}" + (f" of {progress.total}" if progress.total else "")
        else:
            share = 100 * progress.done // max(progress.total, 1)
            text = f"{progress.what}: {share}% of {output.size(progress.total)}"
        if self._live:
            sys.stderr.write(f"\r{text:<60}")
            sys.stderr.flush()
            self._open = True
        else:
            output.note(text)
