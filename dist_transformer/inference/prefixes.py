"""Prefixes: texts that outputs must begin with, for search and sampling.

The pieces of a prefix are forced, except those of its last word, at most 32 bytes. The rest is a text that the output
must continue: until it is covered, a hypothesis may take the pieces that the rest of the text begins with, and those
that begin with the rest of the text. So a prefix may end inside a word: after `Ein Ha` the piece ` Haus` may come as
well as ` Ha` or ` H`. Probabilities stay the model's. So a greedy search that is given a beginning of its own output
gives that output, because its choices are still allowed.

Text is compared byte by byte, because a piece may be a part of a character.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import PAD_ID, Tokenizer

# Each byte of the rest takes a row of the vocabulary. Words are seldom longer, and in a text without spaces, a piece
# that continues the prefix replaces fewer bytes.
_MOST_FREE_BYTES = 32
_NOT_FORCED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Beginning of an output."""

    forced: tuple[int, ...]
    """Pieces that come first."""
    rest: bytes
    """Text that follows, at least one byte, in pieces that are not fixed."""

    @property
    def most_tokens(self) -> int:
        """Number of pieces that certainly cover it, because each has a byte or more."""
        return len(self.forced) + len(self.rest)


class PieceTexts:
    """Text of all pieces of a target vocabulary, in UTF-8, with a search by their beginnings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        # Special tokens and tags have no text, so no prefix allows them.
        self._of_id = [
            tokenizer.piece_bytes(token) if token >= tokenizer.first_piece else b"" for token in range(self.vocab_size)
        ]
        self.lengths = np.array([len(text) for text in self._of_id])
        """Bytes of each entry."""
        self._longest = int(self.lengths.max())
        order = sorted(filter(self._of_id.__getitem__, range(self.vocab_size)), key=self._of_id.__getitem__)
        self._order = np.array(order, dtype=np.int64)
        self._sorted = [self._of_id[token] for token in order]

    def encode(self, text: str) -> Prefix:
        """Encode a prefix that is not blank.

        Raises:
            UserError: the vocabulary lacks a character; the message continues a sentence that begins with the line.
        """
        if unknown := self.tokenizer.unknown(text):
            raise UserError(
                f"has a prefix with {unknown[0]}, which is not in the target vocabulary: leave it out, or end the "
                "prefix before it"
            )
        ids = self.tokenizer.encode(text)
        pieces = [self._of_id[token] for token in ids]
        # After a piece that is only a space no word begins: other pieces of the same word begin with that space.
        ended = [piece.lstrip(b" ").endswith(b" ") for piece in pieces]
        words = [i for i in range(1, len(ids)) if pieces[i].startswith(b" ") or ended[i - 1]]
        # A vocabulary may put a space after the last word.
        spaced = self.tokenizer.normalize(text).endswith(" ")
        start = max([0, *words])
        while start < len(ids) - 1 and sum(map(len, pieces[start:])) > _MOST_FREE_BYTES:
            start += 1
        while not (rest := b"".join(pieces[start:]) if spaced else b"".join(pieces[start:]).rstrip(b" ")):
            start -= 1
        return Prefix(forced=tuple(ids[:start]), rest=rest)

    def allowed(self, rest: bytes) -> np.ndarray:
        """Return the entries that may come when the first i bytes are covered, shape (len(rest), V).

        Entries after which nothing could cover the text are left out.
        """
        allowed = np.zeros((len(rest), self.vocab_size), dtype=bool)
        leads_on = [False] * len(rest)
        for start in range(len(rest) - 1, -1, -1):
            allowed[start, self._beginning_with(rest[start:])] = True
            for end in range(start + 1, min(len(rest), start + self._longest + 1)):
                if leads_on[end]:
                    allowed[start, self._spelled(rest[start:end])] = True
            leads_on[start] = bool(allowed[start].any())
        return allowed

    def _beginning_with(self, text: bytes) -> np.ndarray:
        first = bisect.bisect_left(self._sorted, text)
        last = bisect.bisect_right(self._sorted, text, lo=first, key=lambda piece: piece[: len(text)])
        return self._order[first:last]

    def _spelled(self, text: bytes) -> np.ndarray:
        first = bisect.bisect_left(self._sorted, text)
        return self._order[first : bisect.bisect_right(self._sorted, text, lo=first)]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes of the sentences of a batch, in order; None where an output is free."""

    texts: PieceTexts
    rows: Sequence[Prefix | None]

    def least_lengths(self) -> np.ndarray:
        """Return the tokens that each output must have room for."""
        return np.array([0 if row is None else row.most_tokens for row in self.rows])


class PrefixTracker:
    """Covered part of the prefix of k hypotheses in each of N slots.

    A hypothesis that has covered all R bytes is free. A shorter rest occupies the last rows. All steps write the same
    tensors in place, and on CUDA none waits for the device.
    """

    def __init__(self, prefixes: Prefixes, *, slots: int, beam_size: int, device: torch.device) -> None:
        self._prefixes, self._device = prefixes, device
        known = [row for row in prefixes.rows if row is not None]
        self._room = max((len(row.rest) for row in known), default=0)
        forced_room = max((len(row.forced) for row in known), default=0) + 1
        vocabulary = prefixes.texts.vocab_size
        self._allowed_NRV = torch.ones(slots, self._room + 1, vocabulary, dtype=torch.bool, device=device)
        # The last column stays empty.
        self._forced_NT = torch.full((slots, forced_room), _NOT_FORCED, device=device)
        self._covered_Nk = torch.full((slots, beam_size), self._room, device=device)
        # Rows of the tables above, which are not moved when sentences leave the batch.
        self._rows_N1 = torch.arange(slots, device=device).unsqueeze(1)
        self._lengths_V = torch.from_numpy(prefixes.texts.lengths).to(device)

    def begin(self, slots_n: torch.Tensor, sentences: Sequence[int]) -> None:
        """Put new sentences into these slots, before any slot is dropped."""
        rows = [self._prefixes.rows[sentence] for sentence in sentences]
        allowed_nRV = np.ones((len(rows), *self._allowed_NRV.shape[1:]), dtype=bool)
        forced_nT = np.full((len(rows), self._forced_NT.shape[1]), _NOT_FORCED)
        covered_n = np.full(len(rows), self._room)
        for i, row in enumerate(rows):
            if row is not None:
                covered_n[i] -= len(row.rest)
                allowed_nRV[i, covered_n[i] : self._room] = self._prefixes.texts.allowed(row.rest)
                forced_nT[i, : len(row.forced)] = row.forced
        covered_nk = covered_n[:, None].repeat(self._covered_Nk.shape[1], axis=1)
        for held, new in (
            (self._allowed_NRV, allowed_nRV),
            (self._forced_NT, forced_nT),
            (self._covered_Nk, covered_nk),
        ):
            held.index_copy_(0, slots_n, torch.from_numpy(new).to(self._device))

    def allowed(self, positions_N: torch.Tensor, *, rows: int) -> torch.Tensor | None:
        """Return which entries the first `rows` hypotheses of each slot may take, shape (N · rows, V); None: all."""
        forced_N1, covered_Nk = self._forced(positions_N), self._covered_Nk[:, :rows]
        is_forced_N1 = forced_N1 >= 0
        if self._device.type == "cpu" and not (is_forced_N1.any() or (covered_Nk < self._room).any()):
            return None
        allowed_NkV = self._allowed_NRV[self._rows_N1, covered_Nk] & ~is_forced_N1.unsqueeze(2)
        # Where nothing is forced this allows `<pad>`, which is never chosen.
        forced_Nk1 = forced_N1.clamp(min=PAD_ID).unsqueeze(2).expand(-1, rows, 1)
        return allowed_NkV.scatter_(2, forced_Nk1, True).flatten(0, 1)

    def advance(self, positions_N: torch.Tensor, parents_Nk: torch.Tensor, tokens_Nk: torch.Tensor) -> None:
        """Continue each place of the beam from the hypothesis that was at place `parents`, with a token more.

        Args:
            positions_N: positions of the tokens.
        """
        added_Nk = self._lengths_V[tokens_Nk].masked_fill_(self._forced(positions_N) >= 0, 0)
        self._covered_Nk.copy_((self._covered_Nk.gather(1, parents_Nk) + added_Nk).clamp_(max=self._room))

    def keep(self, order_N: torch.Tensor) -> None:
        """Keep the sentences `order`."""
        self._rows_N1, self._covered_Nk = self._rows_N1[order_N], self._covered_Nk[order_N]

    def _forced(self, positions_N: torch.Tensor) -> torch.Tensor:
        """Return the token that comes at each slot's position, or -1, shape (N, 1)."""
        return self._forced_NT[self._rows_N1, positions_N.clamp(max=self._forced_NT.shape[1] - 1).unsqueeze(1)]
