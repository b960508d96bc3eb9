"""Marian's files with random weights, and what Marian computes with them, in float64."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece

Arrays = dict[str, np.ndarray]
Kind = Literal["spm", "yml"]
Lines = tuple[Sequence[str], Sequence[str]]

SIDES, STACKS = ("source", "target"), ("encoder", "decoder")

WIDTH, HEADS, INNER = 16, 2, 24
SETTINGS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": WIDTH,
    "dim-rnn": 1024,
    "enc-depth": 2,
    "dec-depth": 1,
    "transformer-heads": HEADS,
    "transformer-dim-ffn": INNER,
    "transformer-ffn-activation": "swish",
    "transformer-ffn-depth": 2,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "tied-embeddings-all": True,
    "output-omit-bias": False,
    "input-types": [],
    "lemma-dim-emb": 0,
    "version": "v1.12.42",
}


def learn(text: Sequence[str], **more: Any) -> bytes:
    """Learn a model of SentencePiece with the special tokens that Marian's training sets."""
    written = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 120,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "bos_id": -1,
        "eos_id": 0,
        "unk_id": 1,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=written, **(settings | more))
    return written.getvalue()


def write_vocabularies(folder: Path, lines: Lines, kind: Kind, *, two: bool = False) -> tuple[list[Path], list[int]]:
    """Write `joint.spm`, or `joint.yml` with `source.spm` and `target.spm`, or with `two` one of each side.

    Returns:
        the vocabularies that Marian reads, and their entries.
    """
    models = {side: learn(text) for side, text in zip(SIDES, lines, strict=True)}
    if kind == "spm":
        contents = [models[side] for side in SIDES] if two else [learn([*lines[0], *lines[1]])] * 2
        files = [folder / f"{name}.spm" for name in (SIDES if two else ("joint", "joint"))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return files, [len(pieces_of(content)) + 2 for content in contents]
    for side, content in models.items():
        (folder / f"{side}.spm").write_bytes(content)
    pieces = [pieces_of(content) for content in models.values()]
    tables = [table_of(side) for side in (pieces if two else [pieces[0] | pieces[1]] * 2)]
    files = [folder / f"{name}.yml" for name in (SIDES if two else ("joint", "joint"))]
    for file, table in zip(files, tables, strict=True):
        file.write_text("".join(f"{_spelled(word, i)}: {i}\n" for i, word in enumerate(table)))
    return files, [len(table) for table in tables]


def pieces_of(model: bytes) -> set[str]:
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {library.id_to_piece(i) for i in range(2, library.get_piece_size())}


def table_of(pieces: set[str]) -> list[str]:
    table = ["</s>", "<unk>", ">>de<<", *sorted(pieces)]
    # Words that a reader of YAML may take for something else.
    return [*table, *(word for word in ("yes", "1.5") if word not in pieces)]


def _spelled(word: str, number: int) -> str:
    return word if number > 8 and word in ("yes", "1.5") else json.dumps(word, ensure_ascii=False)


def write_decoder(folder: Path, vocabularies: Sequence[Path]) -> Path:
    file = folder / "decoder.yml"
    listed = "".join(f"  - {vocabulary.name}\n" for vocabulary in vocabularies)
    file.write_text(f"relative-paths: false\nmodels:\n  - model.npz\nvocabs:\n{listed}beam-size: 6\n")
    return file


def random_arrays(entries: Sequence[int], ties: str) -> Arrays:
    """Return weights by Marian's names. They are no multiples of one another, and no bias is zero.

    Args:
        entries: of both sides.
        ties: `all`, `target`, or `none`; with an older version of Marian, `none, older`.
    """
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    arrays = {"decoder_ff_logit_out_b": draw(1, entries[1])}
    if ties == "all":
        arrays["Wemb"] = draw(entries[1], WIDTH)
    else:
        arrays |= {f"{name}_Wemb": draw(size, WIDTH) for name, size in zip(STACKS, entries, strict=True)}
    if ties == "none":
        arrays["decoder_ff_logit_out_Wt"] = draw(entries[1], WIDTH)
    elif ties == "none, older":
        arrays["decoder_ff_logit_out_W"] = draw(WIDTH, entries[1])
    for side, count in zip(STACKS, (SETTINGS["enc-depth"], SETTINGS["dec-depth"]), strict=True):
        for layer in range(1, count + 1):
            name = f"{side}_l{layer}"
            norms = [f"{name}_ffn_ffn"]
            for part in ("self", "context")[: 1 + (side == "decoder")]:
                for letter in "qkvo":
                    arrays[f"{name}_{part}_W{letter}"] = draw(WIDTH, WIDTH)
                    arrays[f"{name}_{part}_b{letter}"] = draw(1, WIDTH)
                norms.append(f"{name}_{part}_Wo")
            arrays |= {f"{name}_ffn_W1": draw(WIDTH, INNER), f"{name}_ffn_b1": draw(1, INNER)}
            arrays |= {f"{name}_ffn_W2": draw(INNER, WIDTH), f"{name}_ffn_b2": draw(1, WIDTH)}
            for norm in norms:
                arrays |= {f"{norm}_ln_scale": 1 + draw(1, WIDTH), f"{norm}_ln_bias": draw(1, WIDTH)}
    return arrays


def write_npz(file: Path, arrays: Arrays, settings: dict[str, Any]) -> None:
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
    np.savez(file, **arrays, **{"special:model.yml": np.frombuffer(text.encode() + b"\0", np.int8)})


def write_model(folder: Path, lines: Lines, kind: Kind = "spm", *, two: bool = False, ties: str = "all") -> Arrays:
    """Write a whole folder; return its weights."""
    folder.mkdir()
    vocabularies, entries = write_vocabularies(folder, lines, kind, two=two)
    write_decoder(folder, vocabularies)
    arrays = random_arrays(entries, ties)
    tied = {"tied-embeddings-all": ties == "all", "tied-embeddings": ties == "target"}
    write_npz(folder / "model.npz", arrays, SETTINGS | {"dim-vocabs": entries} | tied)
    return arrays


def log_probabilities(arrays: Arrays, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Compute the log-probabilities of target tokens, in float64, after Marian's source code.

    Args:
        source: ids that end with `</s>`, which is 0; target: likewise.

    Returns:
        shape (len(target),).
    """
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}_ln_scale"] + weights[f"{name}_ln_bias"]

    def attend(name: str, x: np.ndarray, memory: np.ndarray, *, causal: bool = False) -> np.ndarray:
        heads = []
        q, k, v = (
            given @ weights[f"{name}_W{letter}"] + weights[f"{name}_b{letter}"]
            for given, letter in zip((x, memory, memory), "qkv", strict=True)
        )
        size = WIDTH // HEADS
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = q[:, part] @ k[:, part].T / size**0.5
            if causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            share = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(share / share.sum(1, keepdims=True) @ v[:, part])
        output = np.concatenate(heads, 1) @ weights[f"{name}_Wo"] + weights[f"{name}_bo"]
        return norm(f"{name}_Wo", x + output)

    def feed_forward(name: str, x: np.ndarray) -> np.ndarray:
        inner = x @ weights[f"{name}_W1"] + weights[f"{name}_b1"]
        outer = inner / (1 + np.exp(-inner)) @ weights[f"{name}_W2"] + weights[f"{name}_b2"]
        return norm(f"{name}_ffn", x + outer)

    def positions(count: int) -> np.ndarray:
        half = WIDTH // 2
        angles = np.arange(count)[:, None] * 10000 ** (-np.arange(half) / (half - 1))
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    embeddings = [weights.get("Wemb", weights.get(f"{name}_Wemb")) for name in STACKS]
    older = weights.get("decoder_ff_logit_out_W")
    output = weights.get("decoder_ff_logit_out_Wt", embeddings[1] if older is None else older.T)
    x = embeddings[0][list(source)] * WIDTH**0.5 + positions(len(source))
    for layer in range(1, SETTINGS["enc-depth"] + 1):
        x = attend(f"encoder_l{layer}_self", x, x)
        x = feed_forward(f"encoder_l{layer}_ffn", x)
    # The decoder begins with zeros, and sees each token one place later.
    shifted = np.concatenate([np.zeros((1, WIDTH)), embeddings[1][list(target)][:-1]])
    y = shifted * WIDTH**0.5 + positions(len(target))
    for layer in range(1, SETTINGS["dec-depth"] + 1):
        y = attend(f"decoder_l{layer}_self", y, y, causal=True)
        y = attend(f"decoder_l{layer}_context", y, x)
        y = feed_forward(f"decoder_l{layer}_ffn", y)
    logits = y @ output.T + weights["decoder_ff_logit_out_b"]
    logits -= logits.max(1, keepdims=True)
    values = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return values[np.arange(len(target)), list(target)]
