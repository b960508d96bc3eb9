"""Marian's own program, which scores and translates, to compare its results with ours."""

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.plain import read_json
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.export.gate import LEAST_IDENTICAL
from dist_transformer.export.libraries import SENTENCES, IdPair
from dist_transformer.export.marian_files import DECODER_FILE, MarianFiles, entries_of
from dist_transformer.model_folder import ModelInfo

_SCORES = " ||| WordScores= "
# Longer lines are skipped.
_LONGEST_LINE = 100_000
_INSTALL = "pip install pymarian (Python 3.11) in an environment of its own, or build Marian, and name its program"


class MarianPeer:
    """Marian's `score` and `decode`, on the CPU. They read pieces, and their ids from a file."""

    precision = "float32"

    def __init__(self, program: Path, files: MarianFiles, vocabulary: Vocabulary, tags: Sequence[str]) -> None:
        """Write tables of ids, unless the vocabularies are such tables.

        Args:
            tags: tags in front of every source.
        """
        self.program, self.files, self.vocabulary = program, files, vocabulary
        # It lasts as long as this object.
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = folder = Path(self._scratch.name)
        self.entries = entries_of(vocabulary, by_model=files.has_sentencepiece)
        self.front = vocabulary.source.tag_ids(tags)
        sides = (vocabulary.source, vocabulary.target)
        self.pieces = [side.pieces for side in sides]
        """Spelling of our ids on both sides, and below its inverse, without entries that Marian lacks."""
        self.ids = [
            {piece: token for token, piece in enumerate(pieces) if token not in (PAD_ID, BOS_ID)}
            for pieces in self.pieces
        ]
        self.splitters = [sentencepiece.SentencePieceProcessor(model_proto=side.library_file) for side in sides]
        self.tables = [*files.vocabularies]
        if files.has_sentencepiece:
            self.tables = [folder / "source.yml", folder / "target.yml"]
            for table, pieces, entries in zip(self.tables, self.pieces, self.entries, strict=True):
                # JSON is YAML.
                numbers = {pieces[token]: number for number, token in enumerate(entries)}
                write_file(table, json.dumps(numbers, ensure_ascii=False, indent=0))

    def reads(self, text: str) -> bool:
        return "\0" not in text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        splitter = self.splitters[0]
        if self.files.has_sentencepiece:
            # Marian takes the numbers of the library, for which unknown characters are never an entry such as `</s>`.
            rows = [[self.entries[0][number] for number in splitter.encode(line)] for line in lines]
        else:
            split = splitter.encode(list(lines), out_type=str)
            rows = [[self.ids[0].get(piece, UNK_ID) for piece in row] for row in split]
        return [[*self.front, *row, EOS_ID] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        rows = [[self.pieces[1][token] for token in row] for row in ids]
        if self.files.has_sentencepiece or not isinstance(self.vocabulary, MarianVocabulary):
            texts = [self.splitters[1].decode_pieces(row) for row in rows]
        else:
            # What OPUS-MT does after Marian; pieces may come from either model.
            texts = ["".join(row).replace("\u2581", " ") for row in rows]
        return [text.strip(" ") for text in texts]

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        names = ("source", "target")
        files = [self._write(name, self._spelled([pair[i] for pair in pairs], i)) for i, name in enumerate(names)]
        common = ("--vocabs", *self.tables, "--max-length", _LONGEST_LINE, "--mini-batch", SENTENCES)
        command = ("score", "--model", self.files.weights, *common, "--train-sets", *files, "--word-scores")
        lines = self._run(command, len(pairs))
        return [[*map(float, line.partition(_SCORES)[2].split())] for line in lines]

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        found = self._translate(self._spelled(sources, 0), [*map(len, sources)], longest, self.tables)
        return [row[: longest - 1] for row in self._read(found)]

    def translate(self, lines: Sequence[str]) -> list[str]:
        rows = self._spelled([row[:-1] for row in self.encode(lines)], 0)
        settings = ("--config", self.files.weights.with_name(DECODER_FILE), "--vocabs", *self.tables)
        command = ("decode", *settings, "--max-length", _LONGEST_LINE, "--input", self._write("source", rows))
        return self.decode(self._read(self._run(command, len(rows))))

    def _read(self, lines: Sequence[str]) -> list[list[int]]:
        """Return our ids of lines of pieces."""
        return [[self.ids[1].get(piece, UNK_ID) for piece in line.split()] for line in lines]

    def texts(self, lines: Sequence[str], longest: int) -> list[Check]:
        """Check greedy translations of text, if Marian splits and joins it itself."""
        if not self.files.has_sentencepiece:
            return []
        sources = self.vocabulary.source.encode_batch(lines)
        theirs = self._translate(lines, [*map(len, sources)], longest, self.files.vocabularies)
        same = 0
        for row, line in zip(self.greedy(sources, longest), theirs, strict=True):
            text, whole = self.vocabulary.target.decode(row), line.strip(" ")
            # The text continues after an output of our limit.
            same += whole == text or (len(row) == longest - 1 and whole.startswith(text))
        found = (
            f"{same:,} of {len(lines):,} translations of text are those of the pieces; {LEAST_IDENTICAL:.1%} must be"
        )
        return [Check.that(same >= LEAST_IDENTICAL * len(lines), name="text", found=found)]

    def _spelled(self, rows: Sequence[Sequence[int]], side: int) -> list[str]:
        return [" ".join(self.pieces[side][token] for token in row) for row in rows]

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        write_file(self.folder / name, "".join(f"{line}\n" for line in lines))
        return self.folder / name

    def _translate(
        self, lines: Sequence[str], lengths: Sequence[int], longest: int, vocabularies: Sequence[Path]
    ) -> list[str]:
        """Translate greedily.

        Args:
            lengths: in tokens, without `</s>`.
        """
        # The limit is a multiple of each source's length.
        factor = math.ceil(longest / (min(lengths) + 1))
        file = self._write("source", lines)
        command = (
            *("decode", "--models", self.files.weights, "--vocabs", *vocabularies, "--input", file),
            *("--beam-size", 1, "--max-length", _LONGEST_LINE, "--max-length-factor", factor),
            *("--mini-batch", SENTENCES, "--maxi-batch", 100, "--maxi-batch-sort", "src"),
        )
        return self._run(command, len(lines))

    def _run(self, command: Sequence[object], lines: int) -> list[str]:
        """Run the program, and return its output: as many lines."""
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
        output = done.stdout.removesuffix("\n").split("\n")
        if len(output) != lines:
            raise UserError(f"{self.program} wrote {len(output):,} lines for {lines:,}: try a newer version")
        return output


def load_marian(
    program: Path, folder: Path, device: torch.device, vocabulary: Vocabulary, info: ModelInfo
) -> MarianPeer:
    """Load a folder that `write_marian` filled; the device is always the CPU."""
    source, target = (folder / name for name in read_json(folder / DECODER_FILE)["vocabs"])
    files = MarianFiles(weights=folder / "model.npz", vocabularies=(source, target))
    return MarianPeer(program, files, vocabulary, info.direction.tags)


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
