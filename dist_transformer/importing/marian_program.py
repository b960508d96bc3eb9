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
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, PAD_ID, UNK_ID
from dist_transformer.export.gate import LEAST_IDENTICAL
from dist_transformer.export.marian import Numbering
from dist_transformer.export.peer import SENTENCES, IdPair
from dist_transformer.importing.marian_files import MarianFiles

_SCORES = " ||| WordScores= "
# Longer lines are skipped.
_LONGEST_LINE = 100_000


class MarianPeer:
    """Marian's `score` and `decode`, on the CPU. They read pieces, and their ids from a file in `folder`."""

    precision = "float32"

    def __init__(
        self, program: Path, files: MarianFiles, vocabulary: MarianVocabulary, folder: Path, tags: Sequence[str]
    ) -> None:
        """Write the table of ids.

        Args:
            tags: tags in front of every source.
        """
        self.program, self.files, self.folder, self.front = program, files, folder, [*tags]
        numbering = Numbering(vocabulary.their_ids)
        self.ours = numbering.ours()
        pieces = [vocabulary.source.pieces[i] for i in self.ours]
        self.ids = {piece: ours for piece, ours in zip(pieces, self.ours, strict=True) if ours != PAD_ID}
        self.spelling = {ours: piece for piece, ours in self.ids.items()}
        table = {piece: number for number, piece in enumerate(pieces) if piece in self.ids}
        self.table = folder / "ids.yml"
        # JSON is YAML.
        write_file(self.table, json.dumps(table, ensure_ascii=False, indent=0))
        self.splitters = [
            sentencepiece.SentencePieceProcessor(model_proto=side.library_file)
            for side in (vocabulary.source, vocabulary.target)
        ]

    def reads(self, text: str) -> bool:
        return "\0" not in text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        front = [self.ids[tag] for tag in self.front]
        splitter = self.splitters[0]
        if self.files.has_sentencepiece:
            # Marian takes the numbers of the library.
            rows = [[self.ours[number] for number in splitter.encode(line)] for line in lines]
        else:
            rows = [[self.ids.get(piece, UNK_ID) for piece in splitter.encode(line, out_type=str)] for line in lines]
        return [[*front, *row, EOS_ID] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        if self.files.has_sentencepiece:
            texts = [self.splitters[1].decode_pieces(self._spell(row)) for row in ids]
        else:
            # What OPUS-MT does after Marian; pieces may come from either model.
            texts = ["".join(self._spell(row)).replace("\u2581", " ") for row in ids]
        return [text.strip(" ") for text in texts]

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[np.ndarray]:
        sides = [self.folder / name for name in ("source", "target")]
        for side, file in enumerate(sides):
            write_file(file, "".join(f"{' '.join(self._spell(pair[side]))}\n" for pair in pairs))
        common = ("--vocabs", self.table, self.table, "--max-length", _LONGEST_LINE, "--mini-batch", SENTENCES)
        lines = self._run("score", "--model", self.files.weights, *common, "--train-sets", *sides, "--word-scores")
        found = [np.array(line.partition(_SCORES)[2].split(), dtype=float) for line in lines]
        if len(found) != len(pairs):
            raise UserError(f"{self.program} scored {len(found):,} of {len(pairs):,} pairs: try a newer version")
        return found

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        lines = [" ".join(self._spell(source)) for source in sources]
        found = self._translate(lines, [len(source) for source in sources], longest, self.table)
        return [[self.ids[piece] for piece in line.split()][: longest - 1] for line in found]

    def texts(self, vocabulary: MarianVocabulary, lines: Sequence[str], longest: int) -> Check:
        """Check greedy translations of text, which Marian splits and joins itself."""
        sources = vocabulary.source.encode_batch(lines)
        theirs = self._translate(lines, [len(source) for source in sources], longest, self.files.vocabularies[0])
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

    def _translate(self, lines: Sequence[str], lengths: Sequence[int], longest: int, vocabulary: Path) -> list[str]:
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
                *("decode", "--models", self.files.weights, "--vocabs", vocabulary, vocabulary, "--input", file),
                *("--beam-size", 1, "--max-length", _LONGEST_LINE, "--max-length-factor", factor),
                *("--mini-batch", SENTENCES, "--maxi-batch", 100, "--maxi-batch-sort", "src"),
            )
            if len(output) != len(places):
                raise UserError(f"{self.program} translated {len(output)} of {len(places)} lines: try a newer version")
            for i, line in zip(places, output, strict=True):
                found[i] = line
        return found

    def _spell(self, row: Sequence[int]) -> list[str]:
        return [self.spelling[token] for token in row]

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
