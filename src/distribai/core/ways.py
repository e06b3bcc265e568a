"""How a machine gets from what it has to a version of the weights, with the fewest bytes; pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from distribai.core.spec import BlobRef
from distribai.core.tasks import UpdateRef, WeightsRef
from distribai.errors import InternalFault


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

    def bytes(self, here: Collection[str] = ()) -> int:
        """Bytes to fetch for who has the blobs ``here`` on disk."""
        return sum(blob.size for blob in self.blobs if blob.sha256 not in here)


def way_to(
    target: WeightsRef,
    held: int | None,
    from_seed: bool = False,
    here: Collection[str] = (),
) -> Way:
    """The way with the fewest bytes to ``target`` for who holds version ``held`` (or nothing); of
    equal ones that with the fewest updates.

    Args:
        target: the version, and what leads there.
        held: a version at hand that may be changed; none that is newer.
        from_seed: version 0 can be made from the seed, so that encoded updates from the first one
            on may take fewer bytes than a snapshot.
        here: SHA-256 of blobs that need not be fetched.

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
