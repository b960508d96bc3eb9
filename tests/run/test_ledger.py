import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.run.ledger import Ledger, batch_hash, left_out_records, read_ledger, truncate_jsonl
from tests.model.small_batches import Pair, make_batch

PAIRS: list[Pair] = [([10, 11, 12], [20, 21]), ([13], [22, 23, 24]), ([14, 15], [25]), ([], [26]), ([16, 17], [])]


def hash_of(pairs: list[Pair], **shape: int) -> int:
    hashed = batch_hash(make_batch(pairs, **shape))
    assert hashed.dtype == torch.int64
    assert hashed.shape == ()
    return int(hashed) % 2**64


WHOLE = hash_of(PAIRS)


def test_order_buffers_and_dummies_do_not_matter() -> None:
    assert hash_of(PAIRS[::-1]) == WHOLE
    assert hash_of([PAIRS[index] for index in (3, 0, 4, 2, 1)]) == WHOLE
    assert hash_of(PAIRS, tail=80) == WHOLE
    assert hash_of(PAIRS, tail=40, cap=5) == WHOLE


@pytest.mark.parametrize("cut", range(6))
def test_the_sum_over_micro_batches_is_the_hash_of_the_whole(cut: int) -> None:
    """Modulo 2^64, as int64 tensors add up over ranks."""
    assert (hash_of(PAIRS[:cut]) + hash_of(PAIRS[cut:], tail=9)) % 2**64 == WHOLE
    parts = torch.stack([batch_hash(make_batch(PAIRS[:cut])), batch_hash(make_batch(PAIRS[cut:]))])
    assert int(parts.sum()) % 2**64 == WHOLE


def test_an_empty_batch_is_zero() -> None:
    assert hash_of([]) == 0
    assert WHOLE != 0


def test_a_pair_that_comes_twice_counts_twice() -> None:
    assert hash_of([PAIRS[0]] * 2) == 2 * hash_of([PAIRS[0]]) % 2**64
    assert hash_of([PAIRS[0]] * 2) not in (0, hash_of([PAIRS[0]]))


def test_any_token_and_any_label_matters() -> None:
    batch = make_batch(PAIRS)
    ends = [int(side.lengths.sum()) for side in (batch.source, batch.target)]
    hashes = {WHOLE}
    for name, end in (("source", ends[0]), ("target", ends[1]), ("labels_T", ends[1])):
        for at in range(end):
            changed = make_batch(PAIRS)
            part = getattr(changed, name)
            (part if name == "labels_T" else part.tokens_T)[at] += 1
            hashes.add(int(batch_hash(changed)) % 2**64)
    assert len(hashes) == 1 + ends[0] + 2 * ends[1]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([(PAIRS[0][0], PAIRS[1][1]), (PAIRS[1][0], PAIRS[0][1]), *PAIRS[2:]], id="targets swapped"),
        pytest.param([([11, 10, 12], [20, 21]), *PAIRS[1:]], id="words of a source swapped"),
        pytest.param([([20, 21], [10, 11, 12]), *PAIRS[1:]], id="sides exchanged"),
        pytest.param([([10, 11], [20, 21]), ([12, 13], [22, 23, 24]), *PAIRS[2:]], id="a word moved to the next"),
        pytest.param(PAIRS[:-1], id="a pair is missing"),
        pytest.param([*PAIRS, ([], [])], id="an empty pair more"),
    ],
)
def test_what_changes_the_hash(changed: list[Pair]) -> None:
    assert hash_of(changed) != WHOLE


def test_labels_exchanged_between_two_pairs() -> None:
    """Inputs are right and what is learnt is not."""
    pairs: list[Pair] = [([10], [20, 21]), ([11], [22, 23])]
    batch = make_batch(pairs)
    labels = batch.labels_T.clone()
    labels[:3], labels[3:6] = batch.labels_T[3:6].clone(), batch.labels_T[:3].clone()
    assert int(batch_hash(dataclasses.replace(batch, labels_T=labels))) != int(batch_hash(batch))


def test_the_hash_never_changes() -> None:
    """The value was computed apart from this code, in plain integers: a changed hash is a changed format."""
    assert hash_of([([10, 11, 12], [20, 21])]) == 0x646262C80C3C2FE4


def written(path: Path, *hashes: int) -> list[str]:
    """Write a ledger with these hashes of its steps, or with five steps."""
    ledger = Ledger(path)
    for step, pair_hash in enumerate(hashes or range(-1, -6, -1), 1):
        ledger.add(step, pair_hash=pair_hash, target_tokens=100 * step)
    assert not path.exists()
    ledger.flush()
    return path.read_text().splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_ledger_comes_back(path: Path) -> None:
    written(path)
    entries = list(read_ledger(path))
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["target_tokens"] for entry in entries] == [100, 200, 300, 400, 500]
    # -1 is 2^64 - 1: an int64 that wrapped around.
    assert entries[0]["hash"] == "ffffffffffffffff"


def test_the_chain_remembers_the_past(path: Path) -> None:
    """Two runs that differ in one early step have other chains from there on."""
    lines, other = written(path, -1, -2, -3), written(path.with_name("other.jsonl"), -1, -9, -3)
    chains = [[json.loads(line)["chain"] for line in each] for each in (lines, other)]
    assert [a == b for a, b in zip(*chains, strict=True)] == [True, False, False]


EDITS = ({"hash": "f" * 16}, {"step": 9}, {"chain": "0" * 64}, {"target_tokens": 301})
LEFT_OUT = LeftOut(corpus=1, shard=7, epoch=2, window=3, packs=4)


def test_shards_that_were_left_out_come_back_and_are_chained(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(1, pair_hash=1, target_tokens=100)
    ledger.add(2, pair_hash=2, target_tokens=100, left_out=(LEFT_OUT,))
    ledger.flush()
    entries = list(read_ledger(path))
    record = {"step": 2, "corpus": 1, "shard": 7, "epoch": 2, "window": 3, "packs": 4}
    assert left_out_records(entries) == [record]
    # By hand: the line as it was without shards, and these as sorted JSON.
    said = '[{"corpus": 1, "epoch": 2, "packs": 4, "shard": 7, "window": 3}]'
    text = f"{entries[0]['chain']} 2 0000000000000002 100 {said}"
    assert entries[1]["chain"] == hashlib.sha256(text.encode()).hexdigest()
    assert entries[0]["chain"] == hashlib.sha256(f"{'0' * 64} 1 0000000000000001 100".encode()).hexdigest()
    lines = path.read_text().splitlines()
    for edited in (lines[1].replace('"shard": 7', '"shard": 8'), lines[1].replace('"left_out"', '"other"')):
        path.write_text(f"{lines[0]}\n{edited}\n")
        with pytest.raises(UserError, match="is broken at line 2: the file was edited or damaged"):
            list(read_ledger(path))


def test_a_ledger_continues_where_it_ended(path: Path) -> None:
    lines = written(path)
    path.unlink()
    written(path, -1, -2, -3)
    ledger = Ledger(path, chain=json.loads(lines[2])["chain"])
    for step in (4, 5):
        ledger.add(step, pair_hash=-step, target_tokens=100 * step)
        ledger.flush()
    assert path.read_text().splitlines() == lines


def exchanged(*order: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: [lines[number] for number in order]


def third_is(edit: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[:2], edit(lines[2]), *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        *((third_is(lambda line, change=change: json.dumps(json.loads(line) | change)), 3) for change in EDITS),
        *((third_is(lambda _, other=other: other), 3) for other in ("", "7", "{}", "\udcff")),
        (exchanged(1, 2, 3, 4), 1),
        (exchanged(0, 1, 3, 4), 3),
        (exchanged(0, 2, 1), 2),
        (exchanged(0, 0, 1), 2),
    ],
)
def test_a_damaged_line_is_found_by_its_number(path: Path, damage: Callable[[list[str]], list[str]], line: int) -> None:
    """Edited, no entry, no UTF-8, dropped, exchanged, repeated; a resume leaves only what is before it."""
    lines = written(path)
    path.write_text("\n".join(damage(lines)) + "\n", errors="surrogateescape")
    with pytest.raises(
        UserError, match=rf"the chain of \S*ledger\.jsonl is broken at line {line}: the file was edited or"
    ):
        list(read_ledger(path))


def test_a_flipped_bit_that_is_no_utf8_cuts_a_ledger_there(path: Path) -> None:
    lines = written(path)
    path.write_text("\n".join([lines[0], f"\udcff{lines[1]}", *lines[2:]]) + "\n", errors="surrogateescape")
    truncate_jsonl(path, 5)
    assert len(list(read_ledger(path))) == 1


def test_a_step_left_out_is_found_though_the_chain_holds(path: Path) -> None:
    ledger = Ledger(path)
    for step in (1, 2, 4):
        ledger.add(step, pair_hash=step, target_tokens=100)
    ledger.flush()
    with pytest.raises(UserError, match="is broken at line 3: the file was edited or damaged"):
        list(read_ledger(path))


@pytest.mark.parametrize("last_step", [0, 1, 3, 5, 9])
def test_truncation_drops_the_lines_after_a_step(path: Path, last_step: int) -> None:
    lines = written(path)
    truncate_jsonl(path, last_step)
    assert path.read_text() == "".join(line + "\n" for line in lines[:last_step])
    assert len(list(read_ledger(path))) == min(last_step, 5)
    assert [file.name for file in path.parent.iterdir()] == ["ledger.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "ha', "", "\0\0\0", "7"])
def test_a_torn_last_line_goes(path: Path, torn: str) -> None:
    """Killed while writing: what a resumed run appends stands on a line of its own."""
    lines = written(path)
    path.write_text("\n".join([*lines[:2], torn]))
    truncate_jsonl(path, 9)
    assert path.read_text().splitlines() == lines[:2]
    assert path.read_text().endswith("\n")


def test_a_whole_last_line_without_its_end_stays(path: Path) -> None:
    lines = written(path)
    path.write_text("\n".join(lines))
    truncate_jsonl(path, 5)
    assert path.read_text() == "".join(line + "\n" for line in lines)


def test_several_records_of_the_last_step_stay(path: Path) -> None:
    """metrics.jsonl: training, validation and checkpoint of one step."""
    records = [{"kind": kind, "step": step} for step in (10, 20) for kind in ("train", "valid", "checkpoint")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    truncate_jsonl(path, 10)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["train", "valid", "checkpoint"]


def test_no_ledger_is_empty(path: Path) -> None:
    Ledger(path).flush()
    truncate_jsonl(path, 3)
    assert list(read_ledger(path)) == []
    assert not path.exists()
