"""The page on programs shows programs that run."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from distribai.client import Client, calls
from distribai.core.webhooks import sign
from tests.http.real import RealGrid, served

__all__ = ["served"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "api.md"


def examples(served: RealGrid) -> tuple[dict[str, Any], list[str]]:
    page = PAGE.read_text(encoding="utf-8").replace("my-model", "micro")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    return {"url": served.url, "token": served.token, "__name__": "page"}, blocks


def test_both_clients_do_what_the_page_says(
    served: RealGrid, capsys: pytest.CaptureFixture[str]
) -> None:
    names, (blocking, awaited, _) = examples(served)
    exec(compile(blocking, str(PAGE), "exec"), names)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "micro submitted 0"
    assert told[-2:] == ["job.submitted", "job.queued"]
    exec(compile(awaited, str(PAGE), "exec"), names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out.splitlines() == ["job.submitted"]


def test_the_receiver_on_the_page_takes_what_the_grid_signs_and_nothing_else(
    served: RealGrid, capsys: pytest.CaptureFixture[str]
) -> None:
    names, (_, _, receiver) = examples(served)
    exec(compile(receiver, str(PAGE), "exec"), names)
    verify = names["verify"]
    server = names["serve"](0)
    names["Hooks"].log_message = lambda *_: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with Client(served.url, served.token) as grid:
            # The grid of this test may go to its own machine: `webhooks.allow_private`.
            made = grid.create_webhook(f"http://127.0.0.1:{server.server_port}/hooks")
            refused = grid.test_webhook(made.id)
            assert (refused.state, refused.status) == ("failed", 401)
            names["Hooks"].secret = made.secret
            taken = grid.test_webhook(made.id)
            assert (taken.state, taken.status) == ("delivered", 204)
            assert [d.status for d in grid.deliveries(made.id)] == [204, 401]
            assert made.id in [hook.id for hook in grid.webhooks()]
            grid.delete_webhook(made.id)
            kinds = [e.kind for e in grid.send(calls.events(kinds=["webhook.*"])).items]
            assert kinds[-2:] == ["webhook.created", "webhook.deleted"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert capsys.readouterr().out.splitlines() == ["webhook.test "]
    assert verify("s", sign("s", 1000, b"x"), b"x", 1299.0)
    assert not verify("s", sign("s", 1000, b"x"), b"x", 1301.0)
    assert not verify("s", sign("s", 1000, b"x"), b"y", 1000.0)
    assert not verify("t", sign("s", 1000, b"x"), b"x", 1000.0)
