import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.model.packed import IGNORED, PackedBatch, PackedTokens, lay_out, pack_side, packed_sides


def pack(sentences: list[list[int]], *, size: int, offset_count: int, max_length: int) -> PackedTokens:
    flat = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    return pack_side(flat, lengths, size=size, offset_count=offset_count, max_length=max_length)


def test_sentences_then_dummies_by_hand() -> None:
    packed = pack([[11, 12, 13], [21], [31, 32]], size=15, offset_count=9, max_length=4)
    # Nine rows are left: dummies of 4, 4 and 1.
    assert packed.tokens_T.tolist() == [11, 12, 13, 21, 31, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert packed.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert packed.offsets_N.tolist() == [0, 3, 4, 6, 10, 14, 15, 15, 15]
    assert packed.lengths.tolist() == [3, 1, 2]
    assert packed.max_length == 4
    assert (packed.tokens_T.dtype, packed.positions_T.dtype) == (torch.int64, torch.int64)
    # The varlen kernel reads 32-bit offsets.
    assert packed.offsets_N.dtype == torch.int32


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 9), max_size=12), tail=st.integers(0, 40))
def test_every_row_belongs_to_one_sentence_no_longer_than_the_cap(lengths: list[int], tail: int) -> None:
    cap, size = 9, max(1, sum(lengths) + tail)
    sentences = [list(range(100 * i, 100 * i + length)) for i, length in enumerate(lengths)]
    packed = pack(sentences, size=size, offset_count=len(lengths) + 40, max_length=cap)
    offsets = packed.offsets_N.numpy()
    pieces = np.diff(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == size
    assert pieces[: len(lengths)].tolist() == lengths
    assert pieces.min() >= 0
    assert pieces.max() <= cap
    starts = np.repeat(offsets[:-1], pieces)
    assert np.array_equal(packed.positions_T.numpy(), np.arange(size) - starts)
    for i, sentence in enumerate(sentences):
        assert packed.tokens_T[offsets[i] : offsets[i + 1]].tolist() == sentence


def test_buffers_are_laid_out_together_as_each_alone() -> None:
    """Full, empty and with a tail; offsets, starts and positions of each are its own."""
    counts = np.array([3, 0, 1])
    lengths = np.array([3, 1, 4, 2])
    layout = lay_out(lengths, counts, size=8, offset_count=7, max_length=4)
    tokens = np.arange(24).reshape(3, 8)
    sides = packed_sides(tokens, layout.positions, layout.offsets, lengths, counts, max_length=4)
    assert layout.starts.tolist() == [0, 3, 4, 16]
    assert layout.used.tolist() == [8, 0, 2]
    assert [side.lengths.tolist() for side in sides] == [[3, 1, 4], [], [2]]
    assert [side.offsets_N.tolist() for side in sides] == [
        [0, 3, 4, 8, 8, 8, 8],
        [0, 4, 8, 8, 8, 8, 8],
        [0, 2, 6, 8, 8, 8, 8],
    ]
    assert [side.positions_T.tolist() for side in sides] == [
        [0, 1, 2, 0, 0, 1, 2, 3],
        [0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 0, 1, 2, 3, 0, 1],
    ]
    assert [side.tokens_T.tolist() for side in sides] == tokens.tolist()


@pytest.mark.parametrize("sentences", [[[11, 12], [21]], [[1, 2, 3], [4, 5, 6, 7]], []])
def test_a_buffer_of_every_sentence_twice(sentences: list[list[int]]) -> None:
    """It is that of all sentences and all again; the dummies of one buffer are cut twice."""
    one = pack(sentences, size=7, offset_count=6, max_length=4)
    both = pack(sentences * 2, size=14, offset_count=11, max_length=4)
    twice = one.twice()
    assert twice.tokens_T.tolist() == both.tokens_T.tolist()
    assert twice.lengths.tolist() == both.lengths.tolist()
    used = sum(map(len, sentences))
    assert twice.positions_T.tolist() == [
        *one.positions_T[:used].tolist(),
        *one.positions_T.tolist(),
        *one.positions_T[used:].tolist(),
    ]
    # The kernels read each position's sentence from the offsets, of which those of real sentences come first.
    starts = torch.repeat_interleave(twice.offsets_N[:-1], twice.offsets_N.diff())
    assert (torch.arange(14) - starts).tolist() == twice.positions_T.tolist()
    assert twice.offsets_N[: len(both.lengths) + 1].tolist() == both.offsets_N[: len(both.lengths) + 1].tolist()
    assert (len(twice.offsets_N), twice.offsets_N.dtype, twice.max_length) == (11, torch.int32, 4)
    halves = one.split_twice(torch.stack((twice.tokens_T, torch.arange(14)), dim=1))
    assert all(half[:, 0].tolist() == one.tokens_T.tolist() for half in halves)
    assert sorted(torch.cat(halves)[:, 1].tolist()) == list(range(14))


def test_sentences_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="sentences of 6 tokens in a buffer of 5"):
        lay_out(np.array([2, 3, 3]), np.array([1, 2]), size=5, offset_count=9, max_length=3)


def test_batch_moves_with_its_sides() -> None:
    side = pack([[4, 5]], size=3, offset_count=4, max_length=2)
    batch = PackedBatch(source=side, target=side, labels_T=torch.tensor([5, 3, IGNORED]))
    moved = batch.to(torch.device("meta"))
    tensors = [moved.labels_T]
    for moved_side in (moved.source, moved.target):
        tensors += [moved_side.tokens_T, moved_side.positions_T, moved_side.offsets_N]
        assert moved_side.lengths is side.lengths
        assert moved_side.max_length == 2
    assert {tensor.device.type for tensor in tensors} == {"meta"}
