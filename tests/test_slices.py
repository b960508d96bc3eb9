"""The slice that continuous integration runs after a commit."""

from tests.slices import SLICES, chosen


def test_the_hash_chooses_among_the_slices_of_the_changed_files() -> None:
    """`docs/` calls for `commands`, and `slurm/` for both of SLURM: sorted, an even hash gives the first of two."""
    assert chosen("f", ["docs/data.md"]) == "commands"
    assert [chosen(commit, ["slurm/train_big.sh"]) for commit in ("10", "11")] == ["slurm-ends", "slurm-jobs"]


def test_without_a_changed_file_every_slice_has_its_turn() -> None:
    turns = {chosen(f"{number:x}", [".gitignore"]) for number in range(100)}
    # That one is always run.
    assert turns == SLICES.keys() - {"smoke"}
