"""How a machine gets from what it has to a version of the weights, with the fewest bytes; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from distribai.core.spec import BlobRef
from distribai.core.tasks import KeptRef, UpdateRef, WeightsRef
from distribai.errors import InternalFault

NOTHING: Mapping[str, int] = {}
"""What lies on the disk of a newcomer."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where to start from, the file of it if there is one, and the updates to apply then, in
    order."""

    start: Literal["held", "seed", "snapshot"]
    whole: BlobRef | None
    updates: tuple[UpdateRef, ...]

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """What it takes."""
        first = () if self.whole is None else (self.whole,)
        return (*first, *(u.blob for u in self.updates))

    def bytes(self, here: Mapping[str, int] = NOTHING) -> int:
        """Bytes to fetch for who has so many ``here`` on disk, by SHA-256."""
        return sum(max(0, blob.size - here.get(blob.sha256, 0)) for blob in self.blobs)


def way_to(
    target: WeightsRef,
    held: int | None,
    from_seed: bool = False,
    here: Mapping[str, int] = NOTHING,
    begun: Collection[KeptRef] = (),
) -> Way:
    """The way with the fewest bytes to ``target`` for who holds version ``held`` (or nothing); of
    equal ones that with the fewest updates.

    Args:
        target: the version, and what leads there.
        held: a version at hand that may be changed; none that is newer.
        from_seed: version 0 can be made from the seed, so that encoded updates from the first one
            on may take fewer bytes than a snapshot.
        here: bytes of blobs that are on disk and need not be fetched, by SHA-256. A part of one
            counts, too: what a slow line has brought is not thrown away for a way that is shorter
            for a newcomer.
        begun: earlier snapshots that were begun to fetch and that ``target`` does not name.

    Raises:
        InternalFault: ``protocol.malformed``: the reference leads nowhere.
    """
    starts: list[tuple[Literal["held", "seed", "snapshot"], BlobRef | None, int]] = []
    if held is not None:
        starts.append(("held", None, held))
    if target.snapshot is None or from_seed:
        starts.append(("seed", None, 0))
    if target.snapshot is not None:
        starts.append(("snapshot", target.snapshot, target.snapshot_version))
    if target.kept is not None:
        starts.append(("snapshot", target.kept.blob, target.kept.version))
    starts += [
        ("snapshot", ref.blob, ref.version) for ref in begun if ref.version <= target.version
    ]
    found = []
    for start, whole, version in starts:
        updates = tuple(u for u in target.updates if u.version > version)
        if [u.version for u in updates] == list(range(version + 1, target.version + 1)):
            found.append(Way(start, whole, updates))
    if not found:
        raise InternalFault(
            "protocol.malformed",
            f"The weights reference of version {target.version} has neither a snapshot nor "
            f"all updates (this node holds {'nothing' if held is None else held}).",
        )
    return min(found, key=lambda way: (way.bytes(here), len(way.updates)))
