"""Parameters that many routes take, each described once."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query

from distribai.core.webhooks import MAX_KINDS

MAX_WAIT_S = 60.0
"""The longest that a request for events or log lines is held."""

Limit = Annotated[int, Query(ge=1, le=1000, description="Entries on one page.")]
Cursor = Annotated[str, Query(max_length=200, description="The previous page's next_cursor.")]
After = Annotated[str, Query(max_length=200, description="Only what lies behind this cursor.")]
Wait = Annotated[
    float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the first entry.")
]
Kinds = Annotated[
    list[str],
    Query(
        alias="kind",
        max_length=MAX_KINDS,
        description="Only events of this kind, or of a family: `job.completed`, `task.*`. May come "
        "several times.",
    ),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="The same key with the same request makes one thing, however often sent; with "
        "another request it is refused (409, `http.idempotency`).",
    ),
]
