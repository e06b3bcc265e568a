"""``distribai grid``: keys, invites and policies; save a whole grid, bring it back, move it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from distribai.cli import audit, invites, keys, migrate, output, rules
from distribai.cli.places import Line, Place, figures, operator_token, words_of

app = App(
    name="grid", help="Keys, invites, policies, the audit feed; save a grid, restore it, move it."
)
app.command(keys.app)
app.command(invites.app)
app.command(rules.policy)
app.command(rules.quota)
app.command(audit.audit)
app.command(migrate.migrate)


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

    with Line() as line:
        saved = asyncio.run(
            back_up(
                settings.orchestrator(),
                out_dir,
                secrets=operator_token(settings),
                incomplete=incomplete,
                told=line.told,
            )
        )
    copied = saved.copied
    if as_json:
        output.document(
            {
                **figures(saved.manifest),
                "copied_blobs": copied.blobs,
                "copied_bytes": copied.bytes,
                "lost": list(saved.manifest.lost),
            }
        )
        return
    output.data(
        f"{words_of(saved.manifest)} saved in {out_dir}; "
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
    before: this is also how a grid moves to another machine. Afterwards start the orchestrator on
    it; never run the old one beside it.
    """
    import asyncio

    settings = (place or Place()).settings().orchestrator()
    from distribai.orchestrator.backup import check_backup, restore

    with Line() as line:
        if check:
            manifest = asyncio.run(check_backup(backup_dir, line.told))
        else:
            manifest = asyncio.run(restore(settings, backup_dir, told=line.told)).manifest
    if as_json:
        output.document({**figures(manifest), "lost": list(manifest.lost)})
        return
    if check:
        output.data(f"The backup is whole: {words_of(manifest)}.")
    else:
        output.data(f"{words_of(manifest)} restored.")
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
