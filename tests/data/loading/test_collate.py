import shutil
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.format import TokenLists, write_shard, write_split
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading import collate
from dist_transformer.data.loading.collate import (
    Collator,
    MicroBatch,
    Sizes,
    build_compiled,
    build_in_numpy,
    epoch_steps,
)
from dist_transformer.data.loading.mixture import Corpora
from dist_transformer.data.loading.packing import Budgets, Pack, Packs, compiled_loops
from dist_transformer.data.loading.plan import Plan, Position, Step, resolve_budgets
from dist_transformer.model.packed import IGNORED, PackedBatch

BOS, EOS = 2, 3
SOURCES = [[10, 11, 12], [13], [14, 15]]
TARGETS = [[20, 21], [22, 23, 24], [25]]
BUDGETS = Budgets(max_source_tokens=12, max_target_tokens=14, max_sentences=4)


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of this file runs with both ways of building."""
    way: str = request.param
    if way == "compiled":
        if shutil.which("g++") is None:
            pytest.skip("no compiler")
        # Otherwise this would be numpy again.
        assert compiled_loops() is not None
    monkeypatch.setattr(collate, "_WORTH_COMPILING", 2**62 if way == "numpy" else 0)
    return way


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Three pairs in two shards."""
    shards = [
        write_shard(
            tmp_path / f"{first}.arrow",
            TokenLists.from_lists(SOURCES[first:last], np.uint16),
            TokenLists.from_lists(TARGETS[first:last], np.uint16),
        )
        for first, last in ((0, 2), (2, 3))
    ]
    return Split(tmp_path, write_split(tmp_path, shards))


def pack(*pairs: int) -> Pack:
    source, target = (sum(len(side[pair]) + 1 for pair in pairs) for side in (SOURCES, TARGETS))
    return Pack(pair_ids=np.array(pairs), source_tokens=source, target_tokens=target)


def packs_of(*packs: Pack, empty: int = 0) -> Packs:
    return Packs.of(packs, empty=empty)


def sentences(batch: PackedBatch) -> list[tuple[tuple[int, ...], ...]]:
    """Source, target in and target out of every real pair, read by the offsets."""
    read = []
    for index in range(len(batch.source.lengths)):
        source, target = (
            slice(side.offsets_N[index], side.offsets_N[index + 1]) for side in (batch.source, batch.target)
        )
        parts = (batch.source.tokens_T[source], batch.target.tokens_T[target], batch.labels_T[target])
        read.append(tuple(tuple(part.tolist()) for part in parts))
    return read


def test_three_pairs_by_hand(split: Split) -> None:
    batch = Collator(split, BUDGETS, packs_per_micro_batch=1).build(packs_of(pack(2, 0, 1)))
    # 12 and 14 tokens fit: buffers of 16, the next multiple of 8.
    assert batch.source.tokens_T.tolist() == [14, 15, EOS, 10, 11, 12, EOS, 13, EOS] + [0] * 7
    assert batch.source.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert batch.target.tokens_T.tolist() == [BOS, 25, BOS, 20, 21, BOS, 22, 23, 24] + [0] * 7
    assert batch.target.positions_T.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert batch.labels_T.tolist() == [25, EOS, 20, 21, EOS, 22, 23, 24, EOS] + [IGNORED] * 7
    # The tail is cut into dummies no longer than the longest sentence, 4 tokens on both sides.
    assert (batch.source.max_length, batch.target.max_length) == (4, 4)
    # 1 + 4 sentences + 16 / 4 dummies; the last entry is repeated.
    assert batch.source.offsets_N.tolist() == [0, 3, 7, 9, 13, 16, 16, 16, 16]
    assert batch.target.offsets_N.tolist() == [0, 2, 5, 9, 13, 16, 16, 16, 16]
    assert batch.source.lengths.tolist() == [3, 4, 2]
    assert batch.target.lengths.tolist() == [2, 3, 4]


def test_packs_lie_end_to_end_in_a_buffer_of_their_number(split: Split) -> None:
    collator = Collator(split, BUDGETS, packs_per_micro_batch=2)
    batch = collator.build(packs_of(pack(1), pack(0, 2)))
    assert (len(batch.source.tokens_T), len(batch.target.tokens_T)) == (24, 32)
    assert batch.source.tokens_T[:9].tolist() == [13, EOS, 10, 11, 12, EOS, 14, 15, EOS]
    assert sentences(batch) == sentences(collator.build(packs_of(pack(1, 0, 2), empty=1)))


def test_a_full_pack_has_no_dummies(split: Split) -> None:
    """The three pairs have 9 tokens on each side; eight times that is a multiple of 8."""
    budgets = Budgets(max_source_tokens=72, max_target_tokens=72, max_sentences=24)
    batch = Collator(split, budgets, packs_per_micro_batch=1).build(packs_of(pack(*(0, 1, 2) * 8)))
    assert IGNORED not in batch.labels_T.tolist()
    assert batch.source.offsets_N.tolist()[:7] == [0, 4, 6, 9, 13, 15, 18]


@pytest.mark.parametrize("packs", [0, 1], ids=["no packs", "a pack of weight zero"])
def test_an_empty_micro_batch_has_the_same_shapes_and_no_label(split: Split, packs: int) -> None:
    collator = Collator(split, BUDGETS, packs_per_micro_batch=1)
    empty, full = collator.build(packs_of(empty=packs)), collator.build(packs_of(pack(0, 1, 2)))
    assert shapes(empty) == shapes(full)
    assert set(empty.labels_T.tolist()) == {IGNORED}
    assert len(empty.source.lengths) == len(empty.target.lengths) == 0
    assert empty.source.offsets_N.tolist() == [0, 4, 8, 12, 16, 16, 16, 16, 16]
    # Every token belongs to a dummy no longer than the cap.
    for side in (empty.source, empty.target):
        assert int(side.offsets_N.diff().max()) <= side.max_length
        assert int(side.positions_T.max()) == side.max_length - 1


def shapes(batch: PackedBatch) -> list[tuple[object, ...]]:
    tensors = [batch.labels_T]
    for side in (batch.source, batch.target):
        tensors += [side.tokens_T, side.positions_T, side.offsets_N]
    caps = (batch.source.max_length, batch.target.max_length)
    return [caps, *((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)]


def step_of(packs: Packs) -> Step:
    return Step(epoch=0, packs=packs, position=Position())


@pytest.mark.parametrize(
    ("packs", "size", "world", "first_packs"),
    [
        # Rank by rank; accumulation turns go through all ranks first.
        (4, 1, 1, [[0, 1, 2, 3]]),
        (4, 1, 2, [[0, 2], [1, 3]]),
        (4, 1, 3, [[0, 3], [1, 4], [2, 5]]),
        (4, 1, 4, [[0], [1], [2], [3]]),
        (4, 2, 1, [[0, 2]]),
        (4, 2, 2, [[0], [2]]),
        (4, 2, 3, [[0], [2], [4]]),
        (5, 2, 2, [[0, 4], [2, 6]]),
    ],
)
def test_first_packs(split: Split, packs: int, size: int, world: int, first_packs: list[list[int]]) -> None:
    collator = Collator(split, BUDGETS, packs_per_micro_batch=size)
    step = step_of(packs_of(*[pack(0)] * packs))
    ranks = [collator.micro_batches(step, rank=rank, world_size=world) for rank in range(world)]
    assert [[micro.first_pack for micro in rank] for rank in ranks] == first_packs


@pytest.fixture(scope="module")
def toy_steps(toy_data: DataFolder) -> tuple[Split, Budgets, list[Step]]:
    """An epoch of four packs a step; its last step has packs of weight zero."""
    train = toy_data.train
    totals = {"source_tokens": train.info.source_tokens, "target_tokens": train.info.target_tokens}
    budgets = resolve_budgets(BatchConfig(max_target_tokens=512), **totals)
    plan = Plan(train.lengths, train.shard_starts, budgets=budgets, window_shards=2, seed=1)
    steps = []
    for step in plan.steps(Position(), 4):
        if step.epoch == 1:
            break
        steps.append(step)
    if not steps[-1].packs.empty:
        steps.append(step_of(Packs.join([steps[-1].packs[:1]], empty=3)))
    return train, budgets, steps


def of_ranks(collator: Collator, step: Step, world: int) -> list[list[MicroBatch]]:
    return [list(collator.micro_batches(step, rank=rank, world_size=world)) for rank in range(world)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_world_trains_on_the_same_sentences(
    toy_steps: tuple[Split, Budgets, list[Step]], world: int, size: int
) -> None:
    train, budgets, steps = toy_steps
    collator = Collator(train, budgets, packs_per_micro_batch=size)
    turns = BatchConfig(packs_per_step=4, packs_per_micro_batch=size).accumulation_steps(world)
    for step in [*steps[:2], steps[-1]]:
        ranks = of_ranks(collator, step, world)
        assert [len(rank) for rank in ranks] == [turns] * world
        pairs = [pair for rank in ranks for micro in rank for pair in sentences(micro.batch)]
        ids = np.concatenate([pack.pair_ids for pack in step.packs if pack])
        source, source_lengths, target, target_lengths = train.tokens(ids)
        wanted = []
        for s, t in zip(
            np.split(source, source_lengths.cumsum()[:-1]), np.split(target, target_lengths.cumsum()[:-1]), strict=True
        ):
            wanted.append(((*s, EOS), (BOS, *t), (*t, EOS)))
        assert sorted(pairs) == sorted(wanted)
        labels = sum(int((micro.batch.labels_T != IGNORED).sum()) for rank in ranks for micro in rank)
        assert labels == step.target_tokens


@pytest.mark.parametrize("size", [1, 2])
def test_all_micro_batches_have_one_shape(toy_steps: tuple[Split, Budgets, list[Step]], size: int) -> None:
    train, budgets, steps = toy_steps
    collator = Collator(train, budgets, packs_per_micro_batch=size)
    batches = [micro.batch for step in steps for micro in collator.micro_batches(step, rank=0, world_size=1)]
    assert len(batches) > 10
    # Fewer turns than ranks: the second rank's only micro-batch is empty.
    batches.append(collator.micro_batches(step_of(steps[0].packs[:1]), rank=1, world_size=2)[0].batch)
    assert all(shapes(batch) == shapes(batches[0]) for batch in batches)
    for batch in batches:
        for side in (batch.source, batch.target):
            offsets = side.offsets_N
            assert (int(offsets[0]), int(offsets[-1])) == (0, len(side.tokens_T))
            assert 0 <= int(offsets.diff().min()) <= int(offsets.diff().max()) <= side.max_length


def test_validation_takes_every_pair_once_in_one_order(toy_data: DataFolder) -> None:
    valid = toy_data.valid
    budgets = Budgets(max_source_tokens=512, max_target_tokens=512, max_sentences=64)
    plan = Plan(valid.lengths, valid.shard_starts, budgets=budgets, window_shards=8, seed=0)
    passes = [list(epoch_steps(plan, packs_per_step=2)) for _ in range(2)]
    ids = [[pack.pair_ids.tolist() for step in steps for pack in step.packs if pack] for steps in passes]
    assert ids[0] == ids[1]
    assert sorted(pair for pack in ids[0] for pair in pack) == list(range(valid.info.pairs))


def random_split(folder: Path, *, pairs: int, shards: int, ids: int, dtype: type[np.generic], seed: int) -> Split:
    """Sentences of 1 to 30 words."""
    rng = np.random.default_rng(seed)
    folder.mkdir()

    def side() -> TokenLists:
        return TokenLists.from_lists([rng.integers(4, ids, rng.integers(1, 31)).tolist() for _ in range(pairs)], dtype)

    return Split(
        folder, write_split(folder, [write_shard(folder / f"{n}.arrow", side(), side()) for n in range(shards)])
    )


def test_compiled_buffers_are_those_of_numpy(tmp_path: Path, way: str) -> None:
    """Two corpora of several shards, one with ids of 16 bits and one with ids that need 32."""
    if way == "numpy":
        pytest.skip("compared with itself")
    corpora = Corpora(
        [
            random_split(tmp_path / "a", pairs=90, shards=3, ids=2**16, dtype=np.uint16, seed=1),
            random_split(tmp_path / "b", pairs=70, shards=2, ids=2**31, dtype=np.uint32, seed=2),
        ]
    )
    rng = np.random.default_rng(3)
    for tokens, counts in [((400, 416), [9, 0, 12, 7]), ((62, 31), [1, 1, 0, 1]), ((8000, 8000), [400])]:
        pair_ids = rng.choice(corpora.first_ids[-1], sum(counts))
        sizes = Sizes(tokens=tokens, max_lengths=(31, 30 + len(counts)), offset_count=sum(counts) + 600)
        library = compiled_loops()
        assert library is not None
        ours = build_compiled(library, corpora.memory(pair_ids), pair_ids, np.array(counts), sizes)
        wanted = build_in_numpy(corpora, pair_ids, np.array(counts), sizes)
        for name in ("tokens", "positions", "offsets", "labels", "lengths"):
            for found, expected in zip(getattr(ours, name), getattr(wanted, name), strict=True):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected, err_msg=name)


def test_pairs_that_do_not_fit_are_refused(split: Split) -> None:
    """No memory outside the buffers is written."""
    collator = Collator(split, BUDGETS, packs_per_micro_batch=1)
    with pytest.raises(ValueError, match="sentences of 18 tokens"):
        collator.build(packs_of(pack(0, 1, 2, 0, 1, 2)))
    many = Budgets(max_source_tokens=64, max_target_tokens=64, max_sentences=2)
    with pytest.raises((ValueError, IndexError)):
        Collator(split, many, packs_per_micro_batch=1).build(packs_of(pack(*[1] * 24)))


def test_a_pair_of_no_shard_is_refused(split: Split, way: str) -> None:
    if way == "numpy":
        pytest.skip("numpy has no table of shards")
    library = compiled_loops()
    assert library is not None
    memory, sizes = split.memory(np.array([0])), Sizes(tokens=(16, 16), max_lengths=(4, 4), offset_count=9)
    for pair in (-1, 2, 3):
        with pytest.raises(IndexError, match="a pair is in no shard"):
            build_compiled(library, memory, np.array([pair]), np.array([1]), sizes)


def test_without_a_compiler_numpy_builds_the_same(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    collator = Collator(split, BUDGETS, packs_per_micro_batch=1)
    wanted = sentences(collator.build(packs_of(pack(2, 0))))
    monkeypatch.setattr(collate, "compiled_loops", lambda: None)
    assert sentences(collator.build(packs_of(pack(2, 0)))) == wanted


def test_links_are_beside_the_tokens_that_have_read_them(tmp_path: Path) -> None:
    """Compare with links by hand, in any order of the pairs; a folder without alignments has none."""
    links = [[[position % 3 for position, _ in enumerate(row)] for row in TARGETS], None]
    splits = []
    for number, rows in enumerate(links):
        folder = tmp_path / str(number)
        folder.mkdir()
        columns = [SOURCES, TARGETS, *([] if rows is None else [rows])]
        lists = (TokenLists.from_lists(column, np.uint16) for column in columns)
        splits.append(Split(folder, write_split(folder, [write_shard(folder / "0.arrow", *lists)])))
    both, ids = Corpora(splits), [2, 3, 0, 1, 4]
    budgets = Budgets(max_sentences=8, max_source_tokens=64, max_target_tokens=64)
    collator = Collator(both, budgets, packs_per_micro_batch=1, links=True)
    sizes = both.sizes(np.array(ids)).sum(axis=1).tolist()
    batch = collator.build(packs_of(Pack(pair_ids=np.array(ids), source_tokens=sizes[0], target_tokens=sizes[1])))
    assert batch.links_T is not None
    found = [
        batch.links_T[start:][:length].tolist()
        for start, length in zip(batch.target.offsets_N, batch.target.lengths, strict=False)
    ]
    wanted = [
        [IGNORED, *(each - 1 for each in links[0][i])] if i < 3 else [IGNORED] * (1 + len(TARGETS[i - 3])) for i in ids
    ]
    assert found == wanted
    assert (batch.links_T[sum(map(len, wanted)) :] == IGNORED).all()
    assert Collator(both, budgets, packs_per_micro_batch=1).build(packs_of(pack(0))).links_T is None
