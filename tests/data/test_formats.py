"""Documents from text and JSON Lines."""

import io
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distribai.data import formats
from distribai.data.formats import Format, Piece, read_files, read_stream
from distribai.errors import InvalidData

TEXT = st.text(alphabet=st.sampled_from("aé漢😀\n"), max_size=60)


def collect(raw: bytes, format: Format = "text", field: str = "text") -> list[str]:
    """The documents of ``raw``, their pieces joined."""
    documents, parts = [], []
    for piece in read_stream(io.BytesIO(raw), "data", format, field):
        parts.append(piece.text)
        if piece.last:
            documents.append("".join(parts))
            parts = []
    assert not parts
    return documents


@settings(max_examples=100, deadline=None)
@given(text=TEXT, chunk=st.integers(1, 9))
@example(text="\ufeffabc", chunk=1)
def test_a_text_is_one_document_however_it_is_cut(text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK_BYTES", chunk)
        assert collect(text.encode()) == [text.removeprefix("\ufeff")]


def test_pieces_end_after_a_line_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 8)
    pieces = list(read_stream(io.BytesIO(b"one\ntwo\nthree-is-long"), "data", "text"))
    assert [p.text for p in pieces] == ["one\ntwo\n", "three-is", "-long", ""]
    assert [p.last for p in pieces] == [False, False, False, True]


@settings(max_examples=60, deadline=None)
@given(good=TEXT, chunk=st.integers(1, 9), tail=st.sampled_from([b"", b"\nmore"]))
@example(good="", chunk=1, tail=b"")
def test_bytes_that_are_no_text_are_named_by_their_offset(
    good: str, chunk: int, tail: bytes
) -> None:
    raw = good.encode() + b"\xe9" + tail
    for format in ("text", "jsonl"):
        lines = raw if format == "text" else raw.replace(b"\n", b" ")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats, "CHUNK_BYTES", chunk)
            with pytest.raises(InvalidData) as caught:
                collect(lines, format)  # type: ignore[arg-type]
        assert caught.value.code == "data.not_utf8"
        assert f"byte {len(good.encode())} " in caught.value.message


def test_json_lines_are_one_document_each() -> None:
    raw = b'\xef\xbb\xbf{"body": "one"}\n\n{"body": "two\\n", "n": 1}\r\n{"body": ""}'
    assert collect(raw, "jsonl", "body") == ["one", "two\n", ""]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": 3}', "no text in the field 'text'"),
        (b"{}", "no text in the field 'text'"),
        (b'["text"]', "not a JSON object"),
        (b'{"text": "cut', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: bytes, why: str) -> None:
    with pytest.raises(InvalidData) as caught:
        collect(b'{"text": "good"}\n' + line + b"\n", "jsonl")
    assert caught.value.code == "data.malformed"
    assert "Line 2 of data" in caught.value.message
    assert why in caught.value.message


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(formats, "CHUNK_BYTES", 16)
    stream = io.BytesIO(b"{}\n" + b"x" * 10_000)
    with pytest.raises(InvalidData, match=r"Line 2 .* is longer"):
        list(formats._lines(stream, "data"))
    assert stream.tell() < 200


def test_files_are_read_in_their_order(tmp_path: Path) -> None:
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_text("first")
    second.write_text("second")
    assert list(read_files([first, second], "text")) == [
        Piece("first", last=False),
        Piece("", last=True),
        Piece("second", last=False),
        Piece("", last=True),
    ]


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InvalidData) as caught:
            list(read_files([path], "text"))
        assert caught.value.code == "data.missing"
        assert str(path) in caught.value.message
