"""``distribai export-weights`` and ``distribai generate``: what comes out of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.errors import UsageError

FORMATS = ("safetensors",)


def export_weights(
    ref: Annotated[str, Parameter(help="A job's id, a unique beginning of it, or its name.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="Where to write the file.")],
    format: Annotated[str, Parameter(help="The file's format: safetensors.")] = "safetensors",
    version: Annotated[int | None, Parameter(help="Which version.  [default: the latest]")] = None,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Write a version's weights to a file.

    The file appears whole and checked, or not at all.
    """
    if format not in FORMATS:
        raise UsageError(
            "usage.format",
            f"There is no format {format!r}.",
            f"Formats: {', '.join(FORMATS)}.",
            field="format",
        )
    with connect(reach) as client:
        number, blob = client.download_weights(ref, version, out)
    if as_json:
        output.document(
            {"path": str(out), "version": number, "sha256": blob.sha256, "size": blob.size}
        )
    else:
        output.data(str(out))
        output.note(f"Version {number}, {output.size(blob.size)}, SHA-256 {blob.sha256}.")


def generate(
    ref: Annotated[str, Parameter(help="A job's id, a unique beginning of it, or its name.")],
    /,
    *,
    prompt: Annotated[str, Parameter(help="The text to go on from.", allow_leading_hyphen=True)],
    max_tokens: Annotated[int, Parameter(help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, Parameter(help="0 takes the likeliest token always.")] = 0.8,
    seed: Annotated[int, Parameter(help="The same seed, the same text.")] = 0,
    version: Annotated[int | None, Parameter(help="Which version.  [default: the latest]")] = None,
    timeout: Annotated[float, Parameter(help="Seconds to wait for a node.")] = 120.0,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Let a node write a sample from a job's weights."""
    with connect(reach) as client:
        sample = client.generate(
            ref,
            prompt,
            version=version,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            timeout=timeout,
        )
    if as_json:
        output.document(sample)
        return
    sys.stdout.write(printable(sample.prompt + sample.text) + "\n")
    if sample.version == 0:
        output.note(
            "This is version 0: the weights that the job began with, before any training of it."
        )


def printable(text: str) -> str:
    """A model may have learned anything: newlines and tabs pass, other control characters of the
    terminal do not."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
