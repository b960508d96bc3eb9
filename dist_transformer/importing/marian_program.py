"""Marian's own program, which scores and translates, to compare its results with ours."""

import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, PAD_ID, UNK_ID, Tokenizer
from dist_transformer.export.gate import LEAST_IDENTICAL
from dist_transformer.export.marian import Numbering
from dist_transformer.export.peer import SENTENCES, IdPair
from dist_transformer.importing.marian_files import MarianFiles

_SCORES = " ||| WordScores= "
# Longer lines are skipped.
_LONGEST_LINE = 100_000


class _Side:
    """Spelling of the entries of one side, and its SentencePiece model."""

    def __init__(self, table: Path, tokenizer: Tokenizer, ours: Sequence[int]) -> None:
        """Write the table of ids.

        Args:
            ours: our id of each of theirs.
        """
        self.table, self.ours = table, ours
        pieces = [tokenizer.pieces[i] for i in ours]
        self.ids = {piece: token for piece, token in zip(pieces, ours, strict=True) if token != PAD_ID}
        self.spelling = {token: piece for piece, token in self.ids.items()}
        self.splitter = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.library_file)
        entries = {piece: number for number, piece in enumerate(pieces) if piece in self.ids}
        # JSON is YAML.
        write_file(table, json.dumps(entries, ensure_ascii=False, indent=0))

    def spell(self, row: Sequence[int]) -> list[str]:
        return [self.spelling[token] for token in row]


class MarianPeer:
    """Marian's `score` and `decode`, on the CPU. They read pieces, and their ids from a file in `folder`."""

    precision = "float32"

    def __init__(
        self, program: Path, files: MarianFiles, vocabulary: MarianVocabulary, folder: Path, tags: Sequence[str]
    ) -> None:
        """Write the tables of ids.

        Args:
            tags: tags in front of every source.
        """
        self.program, self.files, self.folder, self.front = program, files, folder, [*tags]
        sides = (vocabulary.source, vocabulary.target)
        self.sides = [
            _Side(folder / f"{name}.yml", side, Numbering(ids).ours())
            for name, side, ids in zip(("source", "target"), sides, vocabulary.their_ids, strict=True)
        ]

    def reads(self, text: str) -> bool:
        return "\0" not in text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        side = self.sides[0]
        front = [side.ids[tag] for tag in self.front]
        if self.files.has_sentencepiece:
            # Marian takes the numbers of the library.
            rows = [[side.ours[number] for number in side.splitter.encode(line)] for line in lines]
        else:
            split = side.splitter.encode(list(lines), out_type=str)
            rows = [[side.ids.get(piece, UNK_ID) for piece in row] for row in split]
        return [[*front, *row, EOS_ID] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        if self.files.has_sentencepiece:
            texts = [self.sides[1].splitter.decode_pieces(self.sides[1].spell(row)) for row in ids]
        else:
            # What OPUS-MT does after Marian; pieces may come from either model.
            texts = ["".join(self.sides[1].spell(row)).replace("\u2581", " ") for row in ids]
        return [text.strip(" ") for text in texts]

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        files = [self.folder / name for name in ("source", "target")]
        for number, (file, side) in enumerate(zip(files, self.sides, strict=True)):
            write_file(file, "".join(f"{' '.join(side.spell(pair[number]))}\n" for pair in pairs))
        common = ("--vocabs", *self.tables, "--max-length", _LONGEST_LINE, "--mini-batch", SENTENCES)
        lines = self._run("score", "--model", self.files.weights, *common, "--train-sets", *files, "--word-scores")
        found = [np.array(line.partition(_SCORES)[2].split(), dtype=float) for line in lines]
        if len(found) != len(pairs):
            raise UserError(f"{self.program} scored {len(found):,} of {len(pairs):,} pairs: try a newer version")
        return found

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        lines = [" ".join(self.sides[0].spell(source)) for source in sources]
        found = self._translate(lines, [len(source) for source in sources], longest, self.tables)
        return [[self.sides[1].ids[piece] for piece in line.split()][: longest - 1] for line in found]

    def texts(self, vocabulary: MarianVocabulary, lines: Sequence[str], longest: int) -> Check:
        """Check greedy translations of text, which Marian splits and joins itself."""
        sources = vocabulary.source.encode_batch(lines)
        theirs = self._translate(lines, [len(source) for source in sources], longest, self.files.vocabularies)
        same = 0
        for row, line in zip(self.greedy(sources, longest), theirs, strict=True):
            text, whole = vocabulary.target.decode(row), line.strip(" ")
            # The text continues after an output of our limit.
            same += whole == text or (len(row) == longest - 1 and whole.startswith(text))
        return Check.that(
            same >= LEAST_IDENTICAL * len(lines),
            name="text",
            found=f"{same:,} of {len(lines):,} translations of text are those of the pieces; "
            f"{LEAST_IDENTICAL:.1%} must be",
        )

    @property
    def tables(self) -> list[Path]:
        """Files of ids of both sides."""
        return [side.table for side in self.sides]

    def _translate(
        self, lines: Sequence[str], lengths: Sequence[int], longest: int, vocabularies: Sequence[Path]
    ) -> list[str]:
        """Translate greedily.

        Args:
            lengths: in tokens, without `</s>`.
        """
        file = self.folder / "source"
        found = [""] * len(lines)
        # A limit is a multiple of the source's length, so sources of very different lengths are apart.
        for size in {length.bit_length() for length in lengths}:
            places = [i for i, length in enumerate(lengths) if length.bit_length() == size]
            write_file(file, "".join(f"{lines[i]}\n" for i in places))
            factor = math.ceil(longest / (min(lengths[i] for i in places) + 1))
            output = self._run(
                *("decode", "--models", self.files.weights, "--vocabs", *vocabularies, "--input", file),
                *("--beam-size", 1, "--max-length", _LONGEST_LINE, "--max-length-factor", factor),
                *("--mini-batch", SENTENCES, "--maxi-batch", 100, "--maxi-batch-sort", "src"),
            )
            if len(output) != len(places):
                raise UserError(f"{self.program} translated {len(output)} of {len(places)} lines: try a newer version")
            for i, line in zip(places, output, strict=True):
                found[i] = line
        return found

    def _run(self, *command: object) -> list[str]:
        threads = ("--cpu-threads", torch.get_num_threads(), "--quiet")
        try:
            done = subprocess.run(
                [str(part) for part in (self.program, *command, *threads)],
                capture_output=True,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise UserError(f"--marian {self.program} cannot be run ({error.strerror}): {_INSTALL}") from None
        if done.returncode != 0:
            said = done.stderr.splitlines()
            reason = next((line for line in said if "Error:" in line), said[0] if said else "it printed nothing")
            raise UserError(f"{self.program} failed with status {done.returncode} ({reason:.300})")
        return done.stdout.removesuffix("\n").split("\n")


_INSTALL = "pip install pymarian (Python 3.11) in an environment of its own, or build Marian, and name its program"


def find_program(given: str | None) -> Path:
    """Return Marian's program: the given one, or the first in PATH.

    Raises:
        UserError: there is none.
    """
    name = given or shutil.which("marian") or shutil.which("pymarian")
    if name is None:
        raise UserError(
            f"a model of Marian is compared with Marian itself, which is not here: {_INSTALL} with --marian"
        )
    return Path(name)
