"""The blob store's contract, on a directory and on a real S3 API."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribai import points
from distribai.core.spec import BlobRef
from distribai.errors import Conflict, Integrity, NotFound, Unavailable
from distribai.store.blobs import BlobStore, blob_key
from distribai.store.uploads import IDLE_S, WRITE_CHUNK, WRITE_S, Uploads
from tests.store.buckets import CREDENTIALS

MAX = 64 << 20


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def broken(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    raise ConnectionError("the other side is gone")


async def everything(
    store: BlobStore, ref: BlobRef, start: int = 0, stop: int | None = None
) -> bytes:
    return b"".join([chunk async for chunk in store.read(ref.sha256, start, stop)])


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "directory":
        return BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    endpoint: str = request.getfixturevalue("s3_endpoint")
    return BlobStore.open(
        f"s3://grid/{tmp_path.name}",
        tmp_path / "staging",
        max_bytes=MAX,
        s3={**CREDENTIALS, "endpoint": endpoint},
    )


@pytest.fixture
def directory(tmp_path: Path) -> BlobStore:
    return BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)


class TestPutting:
    async def test_a_file_put_is_taken_over_and_reads_back(
        self, store: BlobStore, tmp_path: Path
    ) -> None:
        data = os.urandom(100_000)
        (tmp_path / "file").write_bytes(data)
        await store.put_file(tmp_path / "file", ref_of(data))
        assert not (tmp_path / "file").exists()
        assert await store.exists(ref_of(data).sha256)
        assert await store.size(ref_of(data).sha256) == 100_000
        assert await everything(store, ref_of(data)) == data

    async def test_putting_the_same_blob_again_is_no_error(
        self, store: BlobStore, tmp_path: Path
    ) -> None:
        for _ in range(2):
            (tmp_path / "file").write_bytes(b"same")
            await store.put_file(tmp_path / "file", ref_of(b"same"))
            assert not (tmp_path / "file").exists()

    async def test_a_blob_that_is_put_again_is_new(self, store: BlobStore) -> None:
        before = await store.stat((await store.put_bytes(b"same")).sha256)
        async with asyncio.timeout(180):
            while (await store.stat(before.ref.sha256)).put_at <= before.put_at:
                await store.put_bytes(b"same")  # a bucket dates by the second

    @pytest.mark.parametrize(
        ("declared", "code"),
        [
            (BlobRef(ref_of(b"other").sha256, 5), "blob.hash"),
            (BlobRef(ref_of(b"bytes").sha256, 4), "blob.size"),
            (BlobRef(ref_of(b"bytes").sha256, 6), "blob.truncated"),
        ],
    )
    async def test_a_file_that_is_not_what_it_claims_is_refused_and_stays(
        self, store: BlobStore, tmp_path: Path, declared: BlobRef, code: str
    ) -> None:
        (tmp_path / "file").write_bytes(b"bytes")
        with pytest.raises(Integrity) as caught:
            await store.put_file(tmp_path / "file", declared)
        assert caught.value.code == code
        assert (tmp_path / "file").exists()
        assert not await store.exists(declared.sha256)

    async def test_small_blobs_are_put_from_memory(self, store: BlobStore) -> None:
        ref = await store.put_bytes(b"a manifest")
        assert ref == ref_of(b"a manifest")
        assert await everything(store, ref) == b"a manifest"

    async def test_a_blob_larger_than_one_part_arrives_whole(
        self, store: BlobStore, tmp_path: Path
    ) -> None:
        data = os.urandom(1 << 20) * 17
        (tmp_path / "large").write_bytes(data)
        await store.put_file(tmp_path / "large", ref_of(data))
        async with store.local(ref_of(data)) as path:
            assert path.stat().st_size == len(data)


class TestReading:
    async def test_what_is_stored_is_listed_until_it_is_deleted(self, store: BlobStore) -> None:
        refs = {await store.put_bytes(b"one of them"), await store.put_bytes(b"another")}
        assert refs <= {b.ref async for b in store.stored()}
        gone = refs.pop()
        await store.delete(gone.sha256)
        await store.delete(gone.sha256)
        left = {b.ref async for b in store.stored()}
        assert gone not in left
        assert refs <= left
        assert not await store.exists(gone.sha256)

    async def test_ranges_are_cut_to_the_blob(self, store: BlobStore) -> None:
        ref = await store.put_bytes(b"0123456789")
        assert await everything(store, ref, 2, 5) == b"234"
        assert await everything(store, ref, 8, 100) == b"89"
        assert await everything(store, ref, 10) == b""
        assert await everything(store, ref, 5, 5) == b""

    async def test_an_empty_blob_is_a_blob(self, store: BlobStore) -> None:
        ref = await store.put_bytes(b"")
        assert await everything(store, ref) == b""
        async with store.local(ref) as path:
            assert path.read_bytes() == b""

    @pytest.mark.parametrize("name", ["0" * 64, "nonsense", "../../etc/passwd", "A" * 64])
    async def test_what_is_not_there_is_unknown(self, store: BlobStore, name: str) -> None:
        assert not await store.exists(name)
        with pytest.raises(NotFound) as caught:
            await everything(store, BlobRef(name, 1))
        assert caught.value.code == "blob.unknown"
        with pytest.raises(NotFound):
            async with store.local(BlobRef(name, 1)):
                pass

    async def test_a_local_path_lasts_as_long_as_the_block(self, store: BlobStore) -> None:
        ref = await store.put_bytes(b"weights")
        async with store.local(ref) as path:
            assert path.read_bytes() == b"weights"
        assert await store.exists(ref.sha256)

    async def test_rotten_bytes_are_not_handed_out(
        self, directory: BlobStore, tmp_path: Path
    ) -> None:
        ref = await directory.put_bytes(b"weights")
        (tmp_path / "blobs" / blob_key(ref.sha256)).write_bytes(b"rotten!")
        with pytest.raises(Integrity) as caught:
            async with directory.local(ref):
                pass
        assert caught.value.code == "blob.hash"


class TestUploads:
    async def test_parts_become_a_blob(self, store: BlobStore) -> None:
        data = os.urandom(5000)
        upload = store.uploads.begin(ref_of(data))
        upload = await store.uploads.append(upload.id, 0, chunks(data[:1000], data[1000:2000]))
        assert (upload.offset, upload.complete) == (2000, False)
        assert not await store.exists(ref_of(data).sha256)
        upload = await store.uploads.append(upload.id, 2000, chunks(data[2000:]))
        assert (upload.offset, upload.complete) == (5000, True)
        assert await everything(store, ref_of(data)) == data
        with pytest.raises(NotFound):
            store.uploads.offset(upload.id)

    async def test_a_broken_connection_keeps_what_arrived(self, directory: BlobStore) -> None:
        data = os.urandom(3000)
        upload = directory.uploads.begin(ref_of(data))
        with pytest.raises(ConnectionError):
            await directory.uploads.append(upload.id, 0, broken(data[:1200]))
        offset = directory.uploads.offset(upload.id).offset
        assert offset == 1200
        done = await directory.uploads.append(upload.id, offset, chunks(data[offset:]))
        assert done.complete

    async def test_an_upload_survives_a_restart(self, tmp_path: Path) -> None:
        data = os.urandom(3000)
        first = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
        upload = first.uploads.begin(ref_of(data))
        await first.uploads.append(upload.id, 0, chunks(data[:1000]))
        second = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
        assert second.uploads.offset(upload.id).offset == 1000
        assert second.uploads.claim(upload.id) == ref_of(data)
        assert (await second.uploads.append(upload.id, 1000, chunks(data[1000:]))).complete

    async def test_what_a_slow_line_has_brought_is_there_when_the_process_is_killed_meanwhile(
        self, tmp_path: Path
    ) -> None:
        async def promote(path: Path, ref: BlobRef) -> None:
            assert await asyncio.to_thread(path.read_bytes) == data

        data, now, left = os.urandom(6000), 0.0, list[int]()

        def process() -> Uploads:
            return Uploads(tmp_path, promote=promote, max_bytes=MAX, clock=lambda: now)

        async def slow() -> AsyncIterator[bytes]:
            nonlocal now
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]
                left.append(process().offset(upload.id).offset)  # it is killed here
                now += 0.6 * WRITE_S

        uploads = process()
        upload = uploads.begin(ref_of(data))
        assert (await uploads.append(upload.id, 0, slow())).complete
        assert left == [0, 0, 3000, 3000, 5000, 5000]

    async def test_what_comes_fast_is_written_in_one_go(self, tmp_path: Path) -> None:
        seen: list[str] = []

        async def promote(path: Path, ref: BlobRef) -> None: ...

        uploads = Uploads(tmp_path, promote=promote, max_bytes=MAX, clock=lambda: 0.0)
        data = os.urandom(200_000)
        upload = uploads.begin(ref_of(data))
        points.install(seen.append)
        try:
            pieces = (data[i : i + 1000] for i in range(0, len(data), 1000))
            assert (await uploads.append(upload.id, 0, chunks(*pieces))).complete
        finally:
            points.install(None)
        assert seen.count("upload.part.after") == 1

    async def test_an_upload_that_is_too_long_is_refused_at_once_and_dropped(
        self, directory: BlobStore
    ) -> None:
        seen = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal seen
            while True:
                seen += 1
                yield b"x" * WRITE_CHUNK

        upload = directory.uploads.begin(ref_of(b"short"))
        with pytest.raises(Integrity) as caught:
            await directory.uploads.append(upload.id, 0, endless())
        assert caught.value.code == "blob.size"
        assert seen == 1
        with pytest.raises(NotFound):
            directory.uploads.offset(upload.id)

    async def test_the_wrong_bytes_are_refused_and_dropped(self, directory: BlobStore) -> None:
        upload = directory.uploads.begin(ref_of(b"right"))
        with pytest.raises(Integrity) as caught:
            await directory.uploads.append(upload.id, 0, chunks(b"wrong"))
        assert caught.value.code == "blob.hash"
        assert not await directory.exists(ref_of(b"right").sha256)
        with pytest.raises(NotFound):
            directory.uploads.offset(upload.id)

    async def test_another_offset_is_refused_and_changes_nothing(
        self, directory: BlobStore
    ) -> None:
        upload = directory.uploads.begin(ref_of(b"0123456789"))
        await directory.uploads.append(upload.id, 0, chunks(b"0123"))
        for offset in (0, 3, 5, 10):
            with pytest.raises(Conflict) as caught:
                await directory.uploads.append(upload.id, offset, chunks(b"456789"))
            assert caught.value.code == "blob.offset"
        assert directory.uploads.offset(upload.id).offset == 4

    async def test_a_later_request_takes_over_from_one_that_hangs(
        self, directory: BlobStore
    ) -> None:
        hang, arrived = asyncio.Event(), asyncio.Event()

        async def half_open() -> AsyncIterator[bytes]:
            arrived.set()
            await hang.wait()
            yield b"01234"

        upload = directory.uploads.begin(ref_of(b"0123456789"))
        first = asyncio.create_task(directory.uploads.append(upload.id, 0, half_open()))
        await arrived.wait()
        assert (await directory.uploads.append(upload.id, 0, chunks(b"012"))).offset == 3
        hang.set()
        with pytest.raises(Conflict):
            await first
        assert (await directory.uploads.append(upload.id, 3, chunks(b"3456789"))).complete

    async def test_two_uploads_of_one_blob_both_succeed(self, store: BlobStore) -> None:
        ref = ref_of(b"common")
        one, two = store.uploads.begin(ref), store.uploads.begin(ref)
        assert (await store.uploads.append(one.id, 0, chunks(b"common"))).complete
        assert (await store.uploads.append(two.id, 0, chunks(b"common"))).complete

    async def test_an_empty_blob_takes_one_empty_request(self, store: BlobStore) -> None:
        upload = store.uploads.begin(ref_of(b""))
        assert (await store.uploads.append(upload.id, 0, chunks())).complete

    def test_a_blob_beyond_the_limit_is_refused_before_a_byte(self, directory: BlobStore) -> None:
        with pytest.raises(Integrity) as caught:
            directory.uploads.begin(BlobRef("0" * 64, MAX + 1))
        assert caught.value.code == "blob.size"

    @pytest.mark.parametrize("upload_id", ["", "up_none", "../up_x", "up_../../x", "job_abc"])
    async def test_an_unknown_upload_is_unknown(self, directory: BlobStore, upload_id: str) -> None:
        with pytest.raises(NotFound):
            directory.uploads.offset(upload_id)
        with pytest.raises(NotFound):
            await directory.uploads.append(upload_id, 0, chunks(b"x"))
        directory.uploads.drop(upload_id)

    async def test_idle_uploads_can_be_dropped(self, directory: BlobStore, tmp_path: Path) -> None:
        old, young = directory.uploads.begin(ref_of(b"old")), directory.uploads.begin(ref_of(b"y"))
        os.utime(tmp_path / "staging" / "uploads" / f"{old.id}.part", (1000, 1000))
        assert directory.uploads.drop_idle(before=2000) == 1
        assert directory.uploads.offset(young.id).offset == 0
        with pytest.raises(NotFound):
            directory.uploads.offset(old.id)

    async def test_a_new_upload_clears_those_left_alone_for_a_day(self, tmp_path: Path) -> None:
        async def promote(path: Path, ref: BlobRef) -> None:
            raise AssertionError("nothing is whole")

        now = [0.0]
        uploads = Uploads(tmp_path, promote=promote, max_bytes=MAX, now=lambda: now[0])
        first = uploads.begin(ref_of(b"first"))
        touched = (tmp_path / f"{first.id}.part").stat().st_mtime
        now[0] = touched + IDLE_S - 1
        uploads.begin(ref_of(b"second"))
        assert uploads.offset(first.id).offset == 0
        now[0] = touched + IDLE_S + 1
        uploads.begin(ref_of(b"third"))
        with pytest.raises(NotFound):
            uploads.offset(first.id)

    async def test_a_full_disk_is_said_and_keeps_the_upload(
        self, directory: BlobStore, tmp_path: Path
    ) -> None:
        upload = directory.uploads.begin(ref_of(b"data"))
        part = tmp_path / "staging" / "uploads" / f"{upload.id}.part"
        part.rename(part.with_suffix(".away"))
        part.mkdir()
        with pytest.raises(Unavailable) as caught:
            await directory.uploads.append(upload.id, 0, chunks(b"data"))
        assert caught.value.code == "blob.store"
        part.rmdir()
        part.with_suffix(".away").rename(part)
        assert (await directory.uploads.append(upload.id, 0, chunks(b"data"))).complete

    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
    async def test_any_cutting_into_requests_gives_the_same_blob(
        self, tmp_path: Path, data: bytes, cuts: list[int]
    ) -> None:
        promoted: list[bytes] = []

        async def promote(path: Path, ref: BlobRef) -> None:
            promoted.append(await asyncio.to_thread(path.read_bytes))

        uploads = Uploads(tmp_path / "uploads", promote=promote, max_bytes=MAX)
        upload = uploads.begin(ref_of(data))
        edges = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
        for start, stop in itertools.pairwise(edges):
            upload = await uploads.append(upload.id, start, chunks(data[start:stop]))
        if not upload.complete:  # only the empty blob has no part to send
            upload = await uploads.append(upload.id, 0, chunks())
        assert upload.complete
        assert promoted == [data]


class TestFailures:
    async def test_an_unreachable_object_store_is_unavailable(self, tmp_path: Path) -> None:
        store = BlobStore.open(
            "s3://nowhere/x",
            tmp_path,
            max_bytes=MAX,
            s3={**CREDENTIALS, "endpoint": "http://127.0.0.1:9"},
            retries=0,
        )
        with pytest.raises(Unavailable) as caught:
            await store.exists("0" * 64)
        assert caught.value.code == "blob.store"

    async def test_a_directory_that_cannot_be_made_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(Unavailable):
            BlobStore.open(tmp_path / "file" / "blobs", tmp_path / "staging", max_bytes=MAX)

    async def test_a_failed_put_leaves_the_file(self, directory: BlobStore, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"data")
        target = tmp_path / "blobs" / blob_key(ref_of(b"data").sha256)
        target.parent.parent.mkdir(parents=True)
        target.parent.write_text("in the way")
        with pytest.raises(Unavailable):
            await directory.put_file(tmp_path / "file", ref_of(b"data"))
        assert (tmp_path / "file").read_bytes() == b"data"


async def test_putting_a_blob_again_heals_one_that_the_disk_has_damaged(tmp_path: Path) -> None:
    store = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    ref = await store.put_bytes(b"whole")
    path = tmp_path / "blobs" / blob_key(ref.sha256)
    path.write_bytes(b"whale")
    with pytest.raises(Integrity):
        async with store.local(ref):
            pass
    assert await store.put_bytes(b"whole") == ref
    assert await everything(store, ref) == b"whole"


async def test_an_upload_that_a_power_cut_has_torn_begins_again(tmp_path: Path) -> None:
    data = b"abcdef" * 1000
    first = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    upload = first.uploads.begin(ref_of(data))
    await first.uploads.append(upload.id, 0, chunks(data[:3000]))
    part = tmp_path / "staging" / "uploads" / f"{upload.id}.part"
    part.write_bytes(bytes(3000))

    again = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    assert again.uploads.offset(upload.id).offset == 3000
    with pytest.raises(NotFound):
        await again.uploads.append(upload.id, 3000, chunks(data[3000:]))
    assert not list(part.parent.iterdir())
    whole = again.uploads.begin(ref_of(data))
    assert (await again.uploads.append(whole.id, 0, chunks(data))).complete


async def test_the_note_of_an_upload_that_was_promoted_by_a_dying_process_is_cleaned_away(
    tmp_path: Path,
) -> None:
    store = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    upload = store.uploads.begin(ref_of(b"data"))
    directory = tmp_path / "staging" / "uploads"
    (directory / f"{upload.id}.part").unlink()
    note = directory / f"{upload.id}.json"
    assert store.uploads.drop_idle(note.stat().st_mtime - 1.0) == 0
    assert store.uploads.drop_idle(note.stat().st_mtime + 1.0) == 1
    assert not note.exists()


async def test_an_upload_that_ends_while_idle_ones_are_looked_for_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    upload = store.uploads.begin(ref_of(b"data"))
    listed = Path.glob

    def finished_just_then(folder: Path, pattern: str) -> list[Path]:
        found = list(listed(folder, pattern))
        for path in found:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "glob", finished_just_then)
    assert store.uploads.drop_idle(before=1e12) == 0
    assert upload.offset == 0


async def test_every_step_of_a_put_is_a_point(store: BlobStore) -> None:
    reached: list[str] = []
    points.install(reached.append)
    try:
        await store.put_bytes(os.urandom(100))
    finally:
        points.install(None)
    files = [f"blob.bytes.{moment}" for moment in ("written", "flushed", "renamed", "durable")]
    assert reached in (files, ["blob.bytes.s3.before", "blob.bytes.s3.after"])


PUT_AND_DIE = """
import asyncio, sys
from pathlib import Path
from distribai import points
from distribai.store.blobs import BlobStore
from distribai.testing.faults import Fault, Injector
root = Path(sys.argv[1])
points.install(Injector([Fault("kill", sys.argv[2])]))
store = BlobStore.open(root / "blobs", root / "staging", max_bytes=1000)
asyncio.run(store.put_bytes(b"data" * 100))
"""


@pytest.mark.parametrize(
    ("moment", "there"),
    [("written", False), ("flushed", False), ("renamed", True), ("durable", True)],
)
async def test_a_blob_that_a_killed_process_was_putting_is_whole_or_not_there(
    tmp_path: Path, moment: str, there: bool
) -> None:
    command = [sys.executable, "-c", PUT_AND_DIE, str(tmp_path), f"blob.bytes.{moment}"]
    dead = await asyncio.create_subprocess_exec(*command)
    assert await dead.wait() == -signal.SIGKILL
    store = BlobStore.open(tmp_path / "blobs", tmp_path / "staging", max_bytes=MAX)
    ref = ref_of(b"data" * 100)
    assert await store.exists(ref.sha256) is there
    assert await store.put_bytes(b"data" * 100) == ref
    async with store.local(ref) as path:
        assert path.read_bytes() == b"data" * 100
    assert not list((tmp_path / "staging" / "scratch").iterdir()), "nothing lies about"
