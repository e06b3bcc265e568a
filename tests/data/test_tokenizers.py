"""Text to ids and back."""

import builtins
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.data import tokenizers as module
from distribai.data.tokenizers import ByteTokenizer, JsonTokenizer, load
from distribai.errors import InvalidData


@pytest.fixture
def word_file(tmp_path: Path) -> Path:
    """A tokenizer of whole words, with an end-of-text token and a gap in its ids."""
    inner = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "hello": 1, "world": 7, "<|endoftext|>": 5}
    tokenizer = inner.Tokenizer(inner.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = inner.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_broken_bytes_and_the_end_of_a_document_decode_without_an_error() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 105, tokenizer.end_of_document]) == "hi"
    assert tokenizer.decode([0xE6, 0xBC]) == "\ufffd"
    assert tokenizer.vocab_size == 257


def test_a_tokenizer_file_makes_ids_and_text(word_file: Path) -> None:
    tokenizer = load(word_file)
    assert tokenizer.encode("hello world").tolist() == [1, 7]
    assert tokenizer.decode([1, 7, 5]) == "hello world"
    assert tokenizer.end_of_document == 5
    assert tokenizer.vocab_size == 8, "one more than the largest id, gaps or not"


def test_without_a_file_there_are_bytes() -> None:
    assert isinstance(load(None), ByteTokenizer)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model": 3}', '{"version": "1.0", "model": null}', "[" * 100_000]
)
def test_a_file_that_is_no_tokenizer_is_malformed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(InvalidData) as caught:
        JsonTokenizer(path)
    assert caught.value.code == "data.malformed"


def test_binary_and_huge_files_are_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InvalidData, match="not a usable tokenizer JSON"):
        JsonTokenizer(path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 3)
    with pytest.raises(InvalidData, match="is larger"):
        JsonTokenizer(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as caught:
        JsonTokenizer(tmp_path / "none.json")
    assert caught.value.code == "data.missing"


def test_without_the_library_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InvalidData) as caught:
        JsonTokenizer(tmp_path / "none.json")
    assert "pip install tokenizers" in caught.value.hint


def _spoiled(word_file: Path, **changes: object) -> Path:
    document = json.loads(word_file.read_text()) | changes
    word_file.write_text(json.dumps(document))
    return word_file


def test_a_tokenizer_without_a_token_for_the_text_is_refused(word_file: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "[UNK]"}
    tokenizer = JsonTokenizer(_spoiled(word_file, model=model), "words.json")
    with pytest.raises(InvalidData, match=r"^words\.json is not a usable") as caught:
        tokenizer.encode("other")
    assert caught.value.code == "data.malformed"


def test_a_file_at_which_the_library_panics_is_refused(
    word_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(InvalidData) as caught:
        JsonTokenizer(_spoiled(word_file, normalizer=broken)).encode("hello")
    assert caught.value.code == "data.malformed"
