import numpy as np

from benchmarks.size import SimulatedPairs
from dist_transformer.data.loading import compiled
from dist_transformer.data.loading.buffers import Sizes, build_in_numpy


def test_compiled_code_reads_the_same_words() -> None:
    """Pairs out of order, next to each other and far apart, one of them twice, in two micro-batches."""
    function = compiled.build_buffers()
    assert function is not None, "this test needs a compiler"
    lengths = np.random.default_rng(1).integers(1, 9, (1000, 2))
    pairs = SimulatedPairs(lengths)
    ids, counts = np.array([999, 3, 4, 0, 512, 3]), np.array([4, 2])
    sizes = Sizes(tokens=(40, 48), max_lengths=pairs.longest, offset_count=60)
    found, wanted = function(pairs.memory(ids), ids, counts, sizes), build_in_numpy(pairs, ids, counts, sizes)
    for name in ("tokens", "positions", "offsets"):
        for side in range(2):
            assert np.array_equal(getattr(found, name)[side], getattr(wanted, name)[side]), (name, side)
    assert np.array_equal(found.labels, wanted.labels)
    assert np.array_equal(found.lengths, wanted.lengths)
