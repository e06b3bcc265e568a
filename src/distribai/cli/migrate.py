"""``distribai grid migrate``: a grid to this program's schema, or to other stores."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.places import Line, Place, figures, operator_token, words_of
from distribai.errors import UsageError

if TYPE_CHECKING:
    from distribai.config import Settings
    from distribai.sections import OrchestratorSettings
    from distribai.store.migrate import Schema


@Parameter(name="*")
@dataclass(frozen=True)
class NewPlace:
    """Where a grid is moved to; what is not given stays."""

    to_db: Annotated[str | None, Parameter(help="Move the rows to this SQLAlchemy URL.")] = None
    to_blobs: Annotated[
        str | None, Parameter(help="Move the blobs to this directory or s3://bucket/prefix.")
    ] = None
    to_state_dir: Annotated[
        Path | None,
        Parameter(help="Move keys and invite here, and what lies in the state directory."),
    ] = None

    def settings(self, old: OrchestratorSettings) -> OrchestratorSettings | None:
        """Those of the grid in its new place; None when it stays where it is."""
        if self == NewPlace():
            return None
        return dataclasses.replace(
            old,
            state_dir=(self.to_state_dir or old.state_dir).expanduser().absolute(),
            db=old.db if self.to_db is None else self.to_db,
            blobs=old.blobs if self.to_blobs is None else self.to_blobs,
        )


def migrate(
    *,
    place: Place | None = None,
    to: NewPlace | None = None,
    check: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Only say what would be done."),
    ] = False,
    incomplete: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Move even if the grid has lost blobs of its own.",
        ),
    ] = False,
    undo: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Let the grid start again where it was before it was moved.",
        ),
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Bring a grid's database to this program's schema; or with --to-... move the grid.

    The schema is what every start of an orchestrator looks after, too; here it is done before the
    first of several replicas starts. Moving takes rows and blobs to another database and blob
    store, reads back every blob, and counts every table, before the new database is a grid. The
    orchestrator must be stopped; nodes may wait. Interrupted it can be run again. Afterwards start
    the orchestrator on the new place. The old database notes where its grid went, and no
    orchestrator starts on it any more, until --undo, given with the old --state-dir and --db, takes
    that back: what was done in the new place since is then lost. No orchestrator may run there, so
    --undo looks; it needs the new address as --to-db if that has a password.
    """
    settings = (place or Place()).settings()
    source = settings.orchestrator()
    target = (to or NewPlace()).settings(source)
    if undo:
        _undo(source, to or NewPlace(), check, as_json)
    elif target is None:
        _upgrade(source, check, as_json)
    elif check:
        _survey(source, target, as_json)
    else:
        _move(settings, source, target, incomplete, as_json)


def _undo(source: OrchestratorSettings, to: NewPlace, check: bool, as_json: bool) -> None:
    from distribai.orchestrator.backup import undo

    if to.to_blobs is not None or to.to_state_dir is not None:
        raise UsageError(
            "usage.invalid",
            "--undo takes a move back; it moves nothing.",
            "Leave --to-blobs and --to-state-dir out; --to-db may say where the grid went.",
        )
    there = asyncio.run(undo(source, to.to_db, check))
    if as_json:
        output.document({"undone": None if check else there, "moved_to": there})
        return
    may = "could" if check else "may"
    output.data(f"The grid {may} start here again. Never start an orchestrator on {there}.")


def _upgrade(source: OrchestratorSettings, check: bool, as_json: bool) -> None:
    from distribai.orchestrator.backup import upgrade_schema

    found = asyncio.run(upgrade_schema(source, check=check))
    if as_json:
        steps = [dataclasses.asdict(step) for step in found.steps]
        done = not check
        output.document(
            {"revision": found.revision, "newest": found.newest, "steps": steps, "done": done}
        )
        return
    for line in _schema_lines(found, check):
        output.data(line)


def _schema_lines(found: Schema, check: bool) -> list[str]:
    if not found.steps:
        return [f"The schema is {found.revision}, which is this program's: nothing to do."]
    would = "would be" if check else "was"
    steps = [f"    {step.revision}  {step.title}" for step in found.steps]
    return [f"The schema {would} brought from {found.revision} to {found.newest}:", *steps]


def _survey(source: OrchestratorSettings, target: OrchestratorSettings, as_json: bool) -> None:
    from distribai.orchestrator.backup import survey

    with Line() as line:
        manifest = asyncio.run(survey(source, target, told=line.told))
    if as_json:
        output.document({**figures(manifest), "to": _place(target)})
        return
    output.data(f"{words_of(manifest)} would be moved to:")
    for name, where in _place(target).items():
        output.data(f"    {name:<11} {where}")


def _move(
    settings: Settings,
    source: OrchestratorSettings,
    target: OrchestratorSettings,
    incomplete: bool,
    as_json: bool,
) -> None:
    from distribai.orchestrator.backup import move

    with Line() as line:
        moved = asyncio.run(
            move(
                source,
                target,
                secrets=operator_token(settings),
                incomplete=incomplete,
                told=line.told,
            )
        )
    if as_json:
        output.document(
            {
                **figures(moved.manifest),
                "copied_blobs": moved.copied.blobs,
                "copied_bytes": moved.copied.bytes,
                "lost": list(moved.manifest.lost),
                "to": _place(target),
            }
        )
        return
    output.data(
        f"{words_of(moved.manifest)} moved; {output.plural(moved.copied.blobs, 'blob')} "
        f"({output.size(moved.copied.bytes)}) copied now, all read back."
    )
    if _has_secret(target.db):
        output.data(
            "Start it there, and nowhere else any more. Its address has a password, which does not "
            "belong on a command line: put the address that you gave as --to-db into the variable "
            "DISTRIBAI_ORCHESTRATOR_DB, or as `db` under [orchestrator] into "
            f"{settings.home.config_file} (readable by you alone), and then:\n"
        )
    else:
        output.data("Start it there, and nowhere else any more:\n")
    output.data(f"    distribai orchestrator start {_words(target)}")
    for sha256, why in sorted(moved.copied.lost.items()):
        output.note(f"lost: {sha256} ({why})")


def _place(target: OrchestratorSettings) -> dict[str, str]:
    from distribai.orchestrator.backup import shown

    return {
        "state_dir": str(target.state_dir),
        "db": shown(target.database_url),
        "blobs": str(target.blob_place),
    }


def _words(target: OrchestratorSettings) -> str:
    import shlex

    words = ["--state-dir", str(target.state_dir)]
    if target.db and not _has_secret(target.db):
        words += ["--db", target.db]
    if target.blobs:
        words += ["--blobs", target.blobs]
    return shlex.join(words)


def _has_secret(url: str) -> bool:
    """Whether a database's URL holds a password, where one belongs or in its query."""
    from sqlalchemy import make_url

    if not url:
        return False
    parsed = make_url(url)
    return parsed.password is not None or any("pass" in name for name in parsed.query)
