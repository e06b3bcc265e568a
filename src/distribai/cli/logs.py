"""Structured logs on stderr: for people on a terminal, JSON lines elsewhere, or as told."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import MutableMapping
from typing import Any

import structlog

from distribai.cli import output


def wants_debug() -> bool:
    """Whether the person asked for debug logs: ``--debug`` or DISTRIBAI_DEBUG."""
    return os.environ.get("DISTRIBAI_DEBUG", "") not in ("", "0")


def configure(debug: bool, form: str = "auto") -> None:
    """Send structlog's and the standard library's logs to stderr, from info (or debug) on.

    ``form`` is ``console`` for people, ``json`` for programs, ``auto`` for what fits stderr. Every
    line carries what is bound to its request or session (``request_id``, ``session``, ``node``).
    """
    level = logging.DEBUG if debug else logging.INFO
    terminal = sys.stderr.isatty() if form == "auto" else form == "console"
    stamp = (
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        if terminal
        else structlog.processors.TimeStamper(fmt="iso", utc=True)
    )
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        stamp,
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.types.Processor = (
        sentence if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if debug else logging.WARNING)
    for name in ("httpx", "httpcore"):  # they log addresses, and some of those are secrets
        logging.getLogger(name).setLevel(logging.WARNING)


def sentence(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """A log entry as a short line for a person: the time, what happened, and what is known of it.

    Empty values are left out, identifiers cut to what tells them apart, long lines wrapped between
    words at the terminal's width. A traceback follows as it is.
    """
    values = dict(event)
    at, level = str(values.pop("timestamp", "")), str(values.pop("level", "info"))
    said = output.visible(str(values.pop("event", "")))
    traceback = values.pop("exception", "")
    told = [f"{key} {_short(value)}" for key, value in values.items() if value not in ("", None)]
    text = said + (f": {', '.join(told)}" if told else "")
    if level != "info":
        text = f"{level}: {text}"
    line = textwrap.fill(
        f"{at} {text}".strip(),
        max(40, shutil.get_terminal_size().columns - 1),
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{line}\n{traceback}" if traceback else line


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = output.visible(str(value))
    if " " not in text and text.startswith(("node_", "job_", "task_")):
        return text[:13]
    return text
