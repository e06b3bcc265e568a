"""A grid in a directory: saved while it runs, restored anywhere, on either database and store; or
moved without the directory (``moving``), or only brought to the newest schema (``upgrading``).

A backup is logical, so it also moves a grid from SQLite to PostgreSQL, from files to S3, and back::

    backup.json                   what the backup is, with the SHA-256 of every part; written last
    snapshots/<name>/<table>.jsonl.gz   the rows of one read snapshot, one JSON list a line
    snapshots/<name>/named-blobs.jsonl.gz   every blob that these rows name: [SHA-256, bytes]
    snapshots/<name>/invite, ..   what no database holds, readable by its owner alone
    blobs/sha256/..               those blobs, laid out as in any grid

Rows first, blobs second: the product writes a blob before the row that names it and deletes none
that a row names, so whatever the snapshot names is still there when it is copied. ``backup.json``
is replaced in one step at the very end: whatever happens before, the last finished backup in the
directory stays one, and a directory without it holds none.
"""

from distribai.orchestrator.backup.format import BackupManifest, Progress, Told
from distribai.orchestrator.backup.loading import Restored, check_backup, restore
from distribai.orchestrator.backup.moving import Moved, move, survey, undo
from distribai.orchestrator.backup.saving import Saved, back_up
from distribai.orchestrator.backup.upgrading import upgrade_schema
from distribai.store.drivers import shown

__all__ = [
    "BackupManifest",
    "Moved",
    "Progress",
    "Restored",
    "Saved",
    "Told",
    "back_up",
    "check_backup",
    "move",
    "restore",
    "shown",
    "survey",
    "undo",
    "upgrade_schema",
]
