"""``distribai version``."""

from __future__ import annotations

from distribai.cli import output


def version(*, as_json: output.Json = False) -> None:
    """Show this program's version and what it runs on."""
    import platform

    from distribai import __version__

    found = {
        "distribai": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }
    if as_json:
        output.document(found)
    else:
        output.data(output.facts(list(found.items())))
