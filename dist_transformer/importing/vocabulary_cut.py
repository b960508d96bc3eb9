"""Cut of a vocabulary of M2M100 or NLLB to the entries that some text needs; texts of these entries keep their pieces.

BPE merges two pieces at a time, so the pieces that a needed one is merged from stay, too. Without the others, every
step still chooses the merge that it chose before, because that one is left. Entries keep their order.
"""

import itertools
import json
from collections.abc import Iterable
from random import Random
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from dist_transformer.data.vocabulary.m2m100 import MODEL_FILE, M2M100Vocabulary
from dist_transformer.data.vocabulary.segmentation import merge

_LINES_AT_ONCE = 10_000


def cut_vocabulary(vocabulary: M2M100Vocabulary, lines: Iterable[str]) -> tuple[dict[str, bytes], list[int]]:
    """Return the files of a tokenizer without the entries that no line needs, and the ids of the entries that stay."""
    remaining, used = iter(lines), set[int]()
    while chunk := list(itertools.islice(remaining, _LINES_AT_ONCE)):
        used.update(itertools.chain.from_iterable(vocabulary.encode_batch(chunk)))
    model = ModelProto.FromString(vocabulary.files[MODEL_FILE])
    kept = _with_parts({vocabulary.pieces[token] for token in used}, {one.piece: -one.score for one in model.pieces})
    rest = [one for one in model.pieces if one.type != ModelProto.SentencePiece.NORMAL or one.piece in kept]
    del model.pieces[:]
    model.pieces.extend(rest)
    model.trainer_spec.vocab_size = len(rest)
    stays = [token for token, piece in enumerate(vocabulary.pieces) if token < vocabulary.first_piece or piece in kept]
    ids = sorted(vocabulary.their_ids[0][token] for token in stays)
    spelled = dict(zip(vocabulary.their_ids[0], vocabulary.pieces, strict=True))
    numbers = {spelled[old]: new for new, old in enumerate(ids)}
    files = {name: _renumbered(name, content, numbers) for name, content in vocabulary.files.items()}
    return files | {MODEL_FILE: model.SerializeToString()}, ids


def _with_parts(pieces: set[str], ranks: dict[str, float]) -> set[str]:
    """Add the pieces that these are merged from."""
    kept, new = set[str](), set(pieces)
    while new:
        kept.add(piece := new.pop())

        def rank(left: str, right: str, whole: str = piece) -> float | None:
            # Without its last merge, a piece is left in the two parts of that.
            return None if left + right == whole else ranks.get(left + right)

        new |= {*merge(piece, rank, dropout=0.0, random=Random(0))} - kept
    return kept & ranks.keys()


def _renumbered(name: str, content: bytes, numbers: dict[str, int]) -> bytes:
    """Return a file of a tokenizer with these entries alone, by their new ids."""
    if name in ("vocab.json", "added_tokens.json"):
        state: Any = _table(json.loads(content), numbers)
    elif name == "tokenizer.json":
        state = json.loads(content)
        model = state["model"]
        model["vocab"] = _table(model["vocab"], numbers)
        merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= numbers.keys()]
        for token in state["added_tokens"]:
            token["id"] = numbers[token["content"]]
    else:
        return content
    return json.dumps(state, ensure_ascii=False).encode("utf-8")


def _table(entries: dict[str, int], numbers: dict[str, int]) -> dict[str, int]:
    return {entry: numbers[entry] for entry in sorted(entries.keys() & numbers.keys(), key=numbers.__getitem__)}
