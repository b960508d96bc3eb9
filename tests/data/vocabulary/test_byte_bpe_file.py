"""Content that the tokenizers library is never given."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary import byte_bpe as module
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.files import load_vocabulary

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def sound() -> bytes:
    return learn_byte_bpe(["hello, hello world"] * 3, vocab_size=268).content


def replaced(*place: str | int, value: Any) -> Change:
    def change(parts: Any) -> None:
        for key in place[:-1]:
            parts = parts[key]
        parts[place[-1]] = value

    return change


HOSTILE: list[tuple[Change, str]] = [
    (replaced("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precompiled"),
    (replaced("normalizer", "normalizers", 0, value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precom"),
    (
        replaced("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex", value="(a*)*(b*)*$"),
        "it has an unknown pattern",
    ),
    (replaced("normalizer", "normalizers", 0, "pattern", "Regex", value="(a+)*$"), r"unknown pattern\)"),
    (replaced("model", "type", value="WordPiece"), "not byte-level BPE"),
    (replaced("model", "vocab", "<pad>", value=4 * 10**9), "do not have the ids 0 to"),
    (replaced("model", "vocab", "<pad>", value=1), "do not have the ids 0 to"),
    (replaced("model", "vocab", "x" * 1000, value=268), "has more than 512 bytes"),
    (replaced("model", "merges", 0, value=["no", "piece"]), "is not made of its entries"),
    (replaced("model", "cache_capacity", value=10**12), "not byte-level BPE"),
    (replaced("added_tokens", 0, "id", value=4 * 10**9), "not in its vocabulary under its id"),
    (replaced("truncation", value={"max_length": 1}), "it has a truncation"),
    (replaced("post_processor", value={"type": "ByteLevel"}), "it has a post_processor"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_a_hostile_part_is_refused_before_the_library_reads_it(
    change: Change, message: str, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = json.loads(sound)
    change(parts)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    # The library may end the process.
    monkeypatch.setattr(module, "Backend", None)
    with pytest.raises(UserError, match=f"tokenizer.json .*{message}"):
        load_vocabulary(tmp_path / "tokenizer.json")


def test_merges_may_be_written_as_older_versions_of_the_library_did(sound: bytes, tmp_path: Path) -> None:
    parts = json.loads(sound)
    assert parts["model"]["merges"]
    parts["model"]["merges"] = [" ".join(merge) for merge in parts["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    (tmp_path / "now.json").write_bytes(sound)
    old, new = (load_vocabulary(tmp_path / name).encode("hello") for name in ("tokenizer.json", "now.json"))
    assert old == new
