"""A small model of SentencePiece, as its own tools make one."""

import io

import pytest
import sentencepiece

TEXT = ["hello wörld, hello", "the world is ½ as old", "e\u0301 ﬁne the wörld"] * 20


@pytest.fixture(scope="session")
def small_sentence_piece() -> bytes:
    """Unigram, with the library's own ids of special tokens (`<unk>` 0, `<s>` 1, `</s>` 2) and its table nmt_nfkc."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=written, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    return written.getvalue()
