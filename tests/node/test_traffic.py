from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.traffic import KNOWN_BYTES, MBPS, MEMORY_BYTES, Seen
from distribai.errors import NotAllowed
from distribai.node.blobs import BlobClient
from distribai.node.clock import SystemClock
from distribai.node.traffic import KEEP_S, Traffic
from distribai.testing.clock import FakeClock, settle
from distribai.testing.proxy import Proxy
from distribai.testing.shaping import Shape, ShapedLink
from tests.node.helpers import BlobServer, NoJitter, eventually, serving

NOVEMBER, DECEMBER = 1_795_000_000.0, 1_797_500_000.0
"""Moments of 2026-11 and 2026-12 in any time zone."""


class Wall:
    """A machine's clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOVEMBER

    def __call__(self) -> float:
        return self.now


def traffic(state: Path | None = None, wall: Wall | None = None, **limits: object) -> Traffic:
    return Traffic(state, FakeClock(), wall=wall or Wall(), **limits)  # type: ignore[arg-type]


async def send(through: Traffic, size: int) -> None:
    with through.sending(size) as moving:
        await moving.go(size)


async def test_what_is_sent_waits_for_the_owners_limit_and_what_comes_does_not() -> None:
    clock = FakeClock()
    limited = Traffic(None, clock, up_mbps=8.0)  # a million bytes a second
    assert limited.up.chunk == 100_000
    with limited.receiving(10**9) as coming, limited.sending(300_000) as moving:
        await moving.go(100_000)
        await coming.go(10**9)
        waiting = asyncio.ensure_future(moving.go(100_000))
        await settle()
        assert not waiting.done()
        await clock.advance(0.1)
        await waiting
    assert (limited.up.total, limited.down.total) == (200_000, 10**9)


async def test_the_link_is_what_transfers_come_at_and_those_at_once_share_their_time() -> None:
    clock = FakeClock()
    free = Traffic(None, clock)
    with free.receiving(KNOWN_BYTES) as one, free.receiving(KNOWN_BYTES) as two:
        await clock.advance(1.0)
        await one.go(KNOWN_BYTES)
        await two.go(KNOWN_BYTES)
        await clock.advance(1.0)
    await clock.advance(100.0)  # at rest it measures nothing
    assert free.down.mbps == pytest.approx(KNOWN_BYTES / MBPS)
    assert free.up.mbps == 0.0, "never measured"
    await send(free, 1000)
    assert free.up.mbps == 0.0, "too little to say anything"


def test_what_was_seen_fades() -> None:
    old = Seen().after(int(MEMORY_BYTES), MEMORY_BYTES / MBPS / 100)
    assert old.mbps == pytest.approx(100.0)
    new = old
    for _ in range(10):
        new = new.after(int(MEMORY_BYTES), MEMORY_BYTES / MBPS / 10)
    assert new.mbps == pytest.approx(10.0, rel=0.01)


async def test_what_is_limited_is_never_told_as_faster_than_its_limit() -> None:
    limited = traffic(up_mbps=1.0)
    with limited.sending(KNOWN_BYTES) as moving:
        pacing = asyncio.ensure_future(moving.go(KNOWN_BYTES))
        await settle()
        pacing.cancel()
    assert limited.up.mbps <= 1.0
    assert (limited.figures().limit_up_mbps, limited.figures().limit_down_mbps) == (1.0, 0.0)


async def test_a_month_that_is_used_up_refuses_and_the_next_one_does_not(tmp_path: Path) -> None:
    wall, said = Wall(), []
    month = Traffic(
        tmp_path,
        FakeClock(),
        month_bytes=10_000,
        wall=wall,
        stream=lambda: 500,
        changed=lambda: said.append(1),
    )
    assert month.why_not() == ""
    await send(month, 4000)
    assert month.left == 5500
    assert month.why_not().startswith("its owner gives 10 kB a month, and 4.5 kB of 2026-11")
    with pytest.raises(NotAllowed) as caught:
        await send(month, 5501)
    assert caught.value.code == "node.month"
    assert said == [1]
    assert month.figures().month_left == 5500, "nothing of it has moved"
    wall.now = DECEMBER
    assert month.left == 10_000
    assert month.why_not() == ""


async def test_a_task_that_would_not_fit_is_not_taken_though_something_is_left() -> None:
    month = traffic(month_bytes=10_000)
    await send(month, 3000)
    assert month.why_not() == "", "as much up and down as before still fits"
    await send(month, 1001)
    assert month.why_not()


async def test_what_was_refused_is_not_tried_again_this_month() -> None:
    wall = Wall()
    month = traffic(None, wall, month_bytes=1000)
    with pytest.raises(NotAllowed):
        month.check(1001)
    assert month.why_not()
    wall.now = DECEMBER
    assert month.why_not() == ""


async def test_months_are_kept_over_restarts_and_over_a_clock_that_is_wrong(
    tmp_path: Path,
) -> None:
    wall = Wall()
    first = traffic(tmp_path, wall, month_bytes=10**9)
    await send(first, 2 * KNOWN_BYTES)
    assert first.left == 10**9 - 2 * KNOWN_BYTES
    wall.now = 0.0  # the clock has lost its battery
    await send(first, 7)
    first.close()
    wall.now = NOVEMBER
    second = traffic(tmp_path, wall, month_bytes=10**9)
    assert second.left == 10**9 - 2 * KNOWN_BYTES
    assert second.up.seen == first.up.seen
    assert second.why_not() == ""


async def test_a_torn_record_counts_anew(tmp_path: Path) -> None:
    first = traffic(tmp_path, month_bytes=1000)
    await send(first, 100)
    first.close()
    (tmp_path / "traffic").write_bytes(b"x" + (tmp_path / "traffic").read_bytes())
    assert traffic(tmp_path, month_bytes=1000).left == 1000


async def test_what_was_counted_is_kept_every_few_seconds(tmp_path: Path) -> None:
    clock = FakeClock()
    running = Traffic(tmp_path, clock, month_bytes=1000, wall=Wall())
    task = asyncio.ensure_future(running.run())
    await eventually(lambda: clock.sleeping)
    await send(running, 100)
    await clock.advance(KEEP_S)
    await eventually(lambda: clock.sleeping)
    task.cancel()
    assert traffic(tmp_path, month_bytes=1000).left == 900


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.booleans()), max_size=40),
    st.integers(1, 2000),
)
def test_transfers_at_once_never_take_more_than_the_month_has(
    asked: list[tuple[bool, int, bool]], budget: int
) -> None:
    async def scene() -> None:
        month = traffic(month_bytes=budget)
        open_ones = []
        for up, size, whole in asked:
            one = month.sending(size) if up else month.receiving(size)
            try:
                moving = one.__enter__()
            except NotAllowed:
                continue
            open_ones.append(one)
            await moving.go(size if whole else size // 2)
            assert month.up.total + month.down.total <= budget
            if len(open_ones) > 3:
                open_ones.pop(0).__exit__(None, None, None)
        for one in open_ones:
            one.__exit__(None, None, None)
        assert month.up.due == month.down.due == 0

    asyncio.run(scene())


async def test_uploads_and_downloads_go_on_over_a_line_that_breaks_again_and_again(
    tmp_path: Path,
) -> None:
    up, down = random.Random(1).randbytes(1_500_000), random.Random(2).randbytes(1_500_000)
    breaks = (200_000, 600_000, 1_000_000, 1_300_000)
    shape = Shape(latency_s=0.002, jitter_s=0.002, resets=breaks)
    link = ShapedLink(shape, shape)
    async with serving(BlobServer()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        async with Proxy("127.0.0.1", port, link) as proxy:
            client = BlobClient(
                f"http://127.0.0.1:{proxy.port}",
                lambda: "secret",
                SystemClock(),
                NoJitter(),
                trust_env=False,
            )
            coming = server.put(down)
            await client.download(coming, tmp_path / "down", "job_a")
            (tmp_path / "up").write_bytes(up)
            server_ref = server.put(up)
            del server.blobs[server_ref.sha256]
            await client.upload(tmp_path / "up", server_ref, "job_a")
            await client.close()
    assert (tmp_path / "down").read_bytes() == down
    assert server.blobs[server_ref.sha256] == up
    starts = [h["range"] for m, _, h in server.requests if m == "GET" and "range" in h]
    offsets = [int(h["upload-offset"]) for m, _, h in server.requests if m == "PATCH"]
    assert len(starts) == len(breaks)
    assert len(offsets) == len(breaks) + 1
    assert offsets == sorted(offsets)
    # What was on its way at a break goes again, and nothing else: no transfer began anew.
    assert offsets[-1] > 900_000
    assert link.bytes_up < len(up) + 600_000
    assert link.bytes_down < len(down) + 600_000
