"""``distribai errors``: what a code means."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.errors import CODES, NotFound


def errors(
    code: Annotated[str | None, Parameter(help="A code as errors show it.")] = None,
    /,
    *,
    as_json: output.Json = False,
) -> None:
    """Explain an error code, or list all of them."""
    if code is not None and code not in CODES:
        import difflib

        near = difflib.get_close_matches(code, CODES, n=1)
        raise NotFound(
            "usage.invalid",
            f"There is no error code {code!r}.",
            f"Did you mean {near[0]}?" if near else "`distribai errors` lists all codes.",
        )
    found = CODES if code is None else {code: CODES[code]}
    if as_json:
        output.document([{"code": c, "meaning": s} for c, s in sorted(found.items())])
    elif code is None:
        output.data(output.table(("CODE", "MEANING"), sorted(found.items())))
    else:
        output.data(CODES[code])
