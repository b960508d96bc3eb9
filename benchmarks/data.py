"""Benchmark of the data pipeline with one process and one thread; preparation is compared with `tokenizers`.

Rates are target tokens per CPU second (`</s>` included).
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer as Backend

from benchmarks.measure import Measured, Part, columns, measure_rates, say
from benchmarks.rows import DATA_ROW
from benchmarks.start import wait_for
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.plan import Plan, Position, resolve_budgets
from dist_transformer.data.loading.prefetch import steps_of_a_block
from dist_transformer.data.loading.statistics import first_epoch
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import LineFiles
from dist_transformer.training.trainer import existing_objects_spared

BATCH = BatchConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataBenchmark(Part):
    """Planning, reading, building, and preparing, which is compared with `tokenizers`."""

    data: Path
    """Data folder."""
    seconds: float = 5.0
    """Seconds of each measure in each round."""
    repeats: int = 5
    """Rounds; medians are reported."""
    text_pairs: int = 20_000
    """Sentence pairs to prepare."""
    memory_pairs: int = 150_000
    """Sentence pairs for the memory of a preparation, measured with these and with ten times as many."""
    seed: int = 1
    """Seed of plan and chosen text."""

    def measure(self) -> Measured:
        torch.set_num_threads(1)
        pa.set_cpu_count(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        folder = DataFolder.open(self.data)
        split = folder.train
        budgets = resolve_budgets(BATCH, source_tokens=split.info.source_tokens, target_tokens=split.info.target_tokens)
        with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as name:
            say("rates: planning, feeding, preparation")
            scratch = Path(name)
            works = feeding_works(split, budgets, self)
            works |= preparation_works(folder, scratch, pairs=self.text_pairs, seed=self.seed)
            with existing_objects_spared():
                rates = measure_rates(works, seconds=self.seconds, repeats=self.repeats)
            say("fill of an epoch")
            epoch = first_epoch(split, budgets, window_shards=BATCH.window_shards, seed=self.seed)
            say(f"memory of preparing {self.memory_pairs:,} pairs, and ten times as many")
            memory = preparation_memory(folder, scratch, pairs=self.memory_pairs, seed=self.seed)
        figures = {
            "pairs": split.info.pairs,
            "shards": len(split.info.shards),
            "target_tokens_per_second": rates,
            "fill_percent": {
                "source": 100 * epoch.source_fill,
                "target": 100 * epoch.target_fill,
                "both": 100 * epoch.fill,
            },
            "unfit_pairs": epoch.unfit_pairs,
            "preparation_memory": memory,
        }
        return Measured(
            what="the data pipeline compared with peers, one process and one thread, target tokens per CPU second; "
            "medians",
            figures=figures,
            table=data_table(figures),
            rows=[DATA_ROW],
            text=folder.index,
            seeds=[self.seed],
        )


def data_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    rows = [("target tokens per CPU second", "median", "lowest", "highest")]
    for name, found in figures["target_tokens_per_second"].items():
        rows.append((name, *(f"{found[each]:,.0f}" for each in rows[0][1:])))
    fill = ", ".join(f"{side} {share:.2f}%" for side, share in figures["fill_percent"].items())
    lines = [*columns(rows), f"fill of an epoch: {fill}; {figures['unfit_pairs']:,} pairs fit no pack"]
    for found in figures["preparation_memory"].values():
        lines.append(f"preparation of {found['pairs']:,} pairs: at most {found['peak_mib']:,.0f} MiB resident")
    return "\n".join(lines)


def feeding_works(split: Split, budgets: Budgets, settings: DataBenchmark) -> dict[str, Iterator[int]]:
    """Make the works of a training's data: planning alone, and all that feeds a training on one rank.

    To feed a training is to plan, to read and verify the shards of each window, and to build complete tensors, with one
    or 8 packs per micro-batch. The cost per micro-batch counts most with one pack; a GPU computes more packs at once.
    """

    def planning() -> Iterator[int]:
        windows, seed = BATCH.window_shards, settings.seed
        plan = Plan(split.lengths, split.shard_starts, budgets=budgets, window_shards=windows, seed=seed)
        for step in plan.steps(Position(), BATCH.packs_per_step):
            yield step.target_tokens

    def feeding(packs_at_once: int) -> Iterator[int]:
        data = open_training_data(
            DataConfig(data=(str(settings.data),)),
            BATCH,
            seed=settings.seed,
            admit=lambda split, window: dict.fromkeys(split.hold(window.shards), 0),
        ).at_once(packs_at_once)
        steps = data.plan.steps(data.plan.start(), BATCH.packs_per_step)
        size = 1
        while True:
            block = list(itertools.islice(steps, size))
            data.collator.micro_batches_of(block, rank=0, world_size=1)
            data.collator.pairs.forget_past()
            yield sum(step.target_tokens for step in block)
            size = steps_of_a_block(block, 1)

    return {"plan": planning(), "feed": feeding(1), "feed_8_packs": feeding(8)}


def preparation_works(folder: DataFolder, scratch: Path, *, pairs: int, seed: int) -> dict[str, Iterator[int]]:
    """Make the works of preparation: text to data folder, and encoding of the same text by `tokenizers` alone.

    Both use a given vocabulary and read tokenizer.json once, before the rounds that count.
    """
    files, tokens = write_text(folder, scratch, pairs=pairs, seed=seed)
    texts = [file.read_bytes().decode("utf-8").split("\n")[:-1] for file in files]
    backend = Backend.from_file(str(folder.path / TOKENIZER_FILE))

    def preparing() -> Iterator[int]:
        for number in itertools.count():
            settings = PrepareSettings(
                out=scratch / f"prepared-{number}",
                sources=(LineFiles(source=files[0], target=files[1]),),
                tokenizer=folder.path / TOKENIZER_FILE,
                source_language=folder.index.source_language,
                target_language=folder.index.target_language,
            )
            prepare(settings, lambda _: None)
            yield tokens

    def encoding(encode: Callable[[Sequence[str]], object]) -> Iterator[int]:
        while True:
            for lines in texts:
                encode(lines)
            yield tokens

    return {
        "prepare": preparing(),
        "tokenizers_encode_batch": encoding(backend.encode_batch),
        "tokenizers_encode_batch_fast": encoding(backend.encode_batch_fast),
    }


def preparation_memory(folder: DataFolder, scratch: Path, *, pairs: int, seed: int) -> dict[str, dict[str, float]]:
    """Measure `pairs`, `seconds` and `peak_mib` of the command for a text, and for one of ten times as many lines.

    One worker prepares everything, so its memory is an upper bound: with more `--workers`, each does a part.
    """
    files, _ = write_text(folder, scratch, pairs=pairs, seed=seed)
    longer = scratch / "longer.source", scratch / "longer.target"
    for file, copy in zip(files, longer, strict=True):
        copy.write_bytes(10 * file.read_bytes())
    found = {}
    for name, (source, target) in {"1x": files, "10x": longer}.items():
        out = scratch / f"memory-{name}"
        words = ["prepare", "--src", source, "--tgt", target, "--tokenizer", (folder.path / TOKENIZER_FILE).resolve()]
        words += ["--src-lang", folder.index.source_language, "--tgt-lang", folder.index.target_language]
        words += ["--workers", 1, "--out", out]
        wait = wait_for(("-m", "dist_transformer", *map(str, words)), str(scratch))
        read = DataFolder.open(out).index.pairs_read
        found[name] = {"pairs": read, "seconds": wait.seconds, "peak_mib": wait.peak_mib}
        shutil.rmtree(out)
    return found


def write_text(folder: DataFolder, scratch: Path, *, pairs: int, seed: int) -> tuple[tuple[Path, Path], int]:
    """Write random pairs as two files, and return their target tokens. Pairs repeat if the corpus has too few."""
    tokenizer = folder.tokenizer()
    chosen = np.resize(np.random.default_rng(seed).permutation(folder.index.train.pairs), pairs)
    source, source_lengths, target, target_lengths = folder.train.tokens(chosen)
    files = scratch / f"{pairs}.source", scratch / f"{pairs}.target"
    sides = ((tokenizer.source, source, source_lengths), (tokenizer.target, target, target_lengths))
    for file, (side, values, lengths) in zip(files, sides, strict=True):
        lines = [side.decode(ids.tolist()) for ids in np.split(values, np.cumsum(lengths)[:-1])]
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return files, len(target) + len(chosen)
