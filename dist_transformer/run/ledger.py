"""The ledger proves which sentences each step trained on, independent of ranks and micro-batches.

Each rank hashes the token tensors that it really computed. A step's hash is the sum, modulo 2^64, of the hashes of its
pairs, so it does not depend on their order or rank. `ledger.jsonl` chains the steps' hashes. It also records from which
step on shards were left out, so that the plan can be computed again from the data alone.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import append_to, log_lines, whole_path
from dist_transformer.base.sole_writer import Fence, unfenced
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.model import packed_attention
from dist_transformer.model.packed import PackedBatch, PackedTokens

# Odd 64-bit constants of splitmix64 (Steele et al. 2014), as signed numbers; torch's int64 products wrap around.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

GENESIS = "0" * 64


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


def _sentence_sums(rows_T: torch.Tensor, side: PackedTokens) -> torch.Tensor:
    sums = torch.nn.functional.pad(rows_T.cumsum(0), (1, 0))
    ends = side.offsets_N[: len(side.lengths) + 1].long()
    return sums[ends[1:]] - sums[ends[:-1]]


def batch_hash(batch: PackedBatch) -> torch.Tensor:
    """Return the sum of the hashes of a micro-batch's pairs, int64, shape (); 0 for a pack of weight zero."""
    source, target = batch.source, batch.target
    if source.tokens_T.is_cuda and packed_attention.gpu_takes(64):
        return hash_by_kernel(batch)
    source_T = _mix((source.tokens_T + 1) * _GAMMA + source.positions_T * 2)
    target_T = _mix((target.tokens_T + 1) * _GAMMA + target.positions_T * 2 + 1) + _mix(batch.labels_T * _GAMMA)
    return _mix(_sentence_sums(source_T, source) * _GAMMA + _mix(_sentence_sums(target_T, target))).sum()


def hash_by_kernel(batch: PackedBatch) -> torch.Tensor:
    """Compute the same as `batch_hash` in one kernel instead of 68, for which a GPU would wait."""
    from dist_transformer.model.gpu_kernels import hash_pairs

    source, target = batch.source, batch.target
    total = source.tokens_T.new_zeros(())
    sides = [tensor for side in (source, target) for tensor in (side.tokens_T, side.positions_T, side.offsets_N)]
    if len(source.lengths):
        hash_pairs[(len(source.lengths),)](*sides, batch.labels_T, total, B=32)
    return total


class Ledger:
    """`ledger.jsonl`: hash and tokens of each step, and the chain over all steps so far. Rank 0 writes it.

    Args:
        chain: the last link in the file.
        fence: check of the run folder's lock.
    """

    def __init__(self, path: Path, *, chain: str = GENESIS, fence: Fence = unfenced) -> None:
        self.path, self.chain, self._fence = path, chain, fence
        self._pending: list[str] = []

    def add(self, step: int, *, pair_hash: int, target_tokens: int, left_out: Sequence[LeftOut] = ()) -> None:
        entry: dict[str, Any] = {"step": step, "hash": f"{pair_hash % 2**64:016x}", "target_tokens": target_tokens}
        if left_out:
            entry["left_out"] = [dataclasses.asdict(shard) for shard in left_out]
        self.chain = chain_link(self.chain, entry)
        self._pending.append(json.dumps({**entry, "chain": self.chain}))

    def flush(self) -> None:
        if self._pending:
            self._fence()
            with append_to(self.path) as file:
                file.write("".join(line + "\n" for line in self._pending).encode())
            self._pending = []


def chain_link(chain: str, entry: dict[str, Any]) -> str:
    text = f"{chain} {entry['step']} {entry['hash']} {entry['target_tokens']}"
    if left_out := entry.get("left_out"):
        text += f" {json.dumps(left_out, sort_keys=True)}"
    return hashlib.sha256(text.encode()).hexdigest()


def left_out_records(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the left-out shards as plain JSON: the fields of `LeftOut`, and the first step without the shard."""
    return [{"step": entry["step"], **shard} for entry in entries for shard in entry.get("left_out", ())]


def read_ledger(path: Path, *, in_progress: bool = False) -> Iterator[dict[str, Any]]:
    """Read the entries of a ledger, one at a time, and check each against the chain.

    Args:
        in_progress: leave out a last line that is still being written.

    Raises:
        UserError: a line does not follow from the one before.
    """
    for number, entry in enumerate(follow_ledger(path, in_progress=in_progress), 1):
        if entry is None:
            raise UserError(f"the chain of {path} is broken at line {number}: the file was edited or damaged")
        yield entry


@dataclasses.dataclass(kw_only=True, slots=True)
class Proof:
    """Facts that an unbroken ledger proves."""

    steps: int = 0
    target_tokens: int = 0
    at: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    """The chain and the target tokens so far at each of the chosen steps."""
    left_out: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """Records in the form of `left_out_records`."""
    shards: list[LeftOut] = dataclasses.field(default_factory=list)
    """The same."""


def prove(path: Path, steps: Collection[int], in_progress: bool) -> Proof:
    """Read a whole ledger.

    Args:
        steps: steps at which the chain is needed.
        in_progress: leave out a last line that is still being written.

    Raises:
        UserError: a line does not follow from the one before.
    """
    proof = Proof()
    for entry in read_ledger(path, in_progress=in_progress):
        proof.steps = entry["step"]
        proof.target_tokens += entry["target_tokens"]
        if proof.steps in steps:
            proof.at[proof.steps] = entry["chain"], proof.target_tokens
        for record in left_out_records([entry]):
            proof.left_out.append(record)
            proof.shards.append(LeftOut(**{name: value for name, value in record.items() if name != "step"}))
    return proof


def follow_ledger(path: Path, *, in_progress: bool = False) -> Iterator[dict[str, Any] | None]:
    """Read the entries of a ledger and check each against the chain; end with None at the first line that breaks it.

    A ledger that does not exist has no entries.

    Args:
        in_progress: leave out a last line that is still being written.
    """
    chain = GENESIS
    # A byte that is not UTF-8 is damage, too: its replacement breaks the chain in that line.
    lines = log_lines(path, in_progress=in_progress) if path.exists() else ()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            chain = chain_link(chain, entry)
            sound = entry["chain"] == chain and entry["step"] == number
        except (ValueError, KeyError, TypeError):
            sound = False
        yield entry if sound else None
        if not sound:
            return


def truncate_jsonl(path: Path, last_step: int) -> None:
    """Drop the lines after `last_step`, which a resumed run writes again, and a torn last line."""
    if not path.exists():
        return
    with whole_path(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        for line in log_lines(path):
            try:
                if json.loads(line)["step"] > last_step:
                    # Lines are not in order of step: a save is recorded when it is complete, some steps later.
                    continue
            except (ValueError, KeyError, TypeError):
                break
            file.write(line if line.endswith("\n") else line + "\n")
