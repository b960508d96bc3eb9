"""`--test-mode`: a dry run of some minutes, to do before a job is queued for days.

The preset's model, optimizer, precision and packs go through the real trainer on one process. It trains on a few packs
of the given data, saves, resumes and decodes, memorizes a few sentences, and prints what it measured.
"""

import dataclasses
import gc
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dist_transformer.base.checks import Check, check_table, failed
from dist_transformer.base.errors import UserError, logger, say
from dist_transformer.base.files import remove_tree
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.folder.subset import write_subset
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings, TextSettings
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.inference.batches import pack_sentences
from dist_transformer.inference.beam import beam_search
from dist_transformer.inference.decoding import Decoding
from dist_transformer.model.packed import PackedBatch
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import CHECKPOINTS, LEDGER_FILE, WEIGHTS, read_records, step_name
from dist_transformer.run.warm_start import read_initial_weights
from dist_transformer.runtime.world import World
from dist_transformer.training.assembly import assemble
from dist_transformer.training.engine.measured_memory import peak_memory_bytes
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.trainer import Trainer

_STEPS, _SAVED_AT = 20, 10
_PARTS = 2
# Share of each pack's pairs that is kept. Packs are built again each epoch, and the pairs must fit into as many packs.
_PAIRS_KEPT = 0.95
_DECODED = 16
# Shares of the peak rate and of the steps. With such a gentle warm-up, every preset learns in so few steps, `big` too.
_RATE, _WARMUP = 0.4, 0.5
_HEART_STEPS, _HEART_PAIRS = 60, 16
# A model that knows only token frequencies reaches their entropy; one that has memorized the sentences is far below.
# The loss must be below this share of the entropy.
_HEART_SHARE = 0.75
# Relative tolerance of log probabilities: beam search computes them position by position, training all at once.
_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}


def require_one_process(world: World) -> None:
    """Check that a dry run can begin.

    Raises:
        UserError: there is more than one process.
    """
    if world.size > 1:
        raise UserError(f"--test-mode is for one process, but {world.size} were started: start it without a launcher")


def run_dry_run(config: TrainConfig, world: World, device: torch.device) -> None:
    """Print measurements and a table of checks.

    Raises:
        UserError: a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="dist_transformer-test-") as scratch:
        if config.corpora.data == EMBEDDED_CORPUS:
            data = Path(scratch) / "embedded"
            prepare(PrepareSettings(out=data, text=TextSettings(toy=5000), vocab_size=1000), lambda _: None)
            logger.info("no --data: using the embedded corpus and 1,000 words; more words need more memory and time")
            config = config.changed(data=(str(data),))
        small = _small_run(config, Path(scratch))
        logger.info(f"training on {small.batch.packs_per_step} packs, and saving …")
        checks, records = _train(small, world, device)
        logger.info("resuming and decoding …")
        checks += _resume_and_decode(small, world, device)
        logger.info(f"memorizing {_HEART_PAIRS} sentences …")
        checks.append(_learn_by_heart(small, Path(scratch), world, device))
    _print_measures(config, records, device)
    say(check_table(checks))
    if failed(checks):
        raise UserError("a check of --test-mode failed, see FAIL above: do not start a long run before it passes")


def _small_run(config: TrainConfig, scratch: Path) -> TrainConfig:
    """Return the settings of the run for a few packs of the data, with a shorter warm-up and shorter intervals.

    The small run always starts with random weights, because trained ones would pass the checks of learning.
    """
    data = open_training_data(
        config.changed(data=config.corpora.data[:1], data_weights=()).corpora, config.batch, seed=config.seed
    )
    folder, budgets = data.first, data.budgets
    saved = config.checkpoints
    if saved.init_from is not None:
        model = config.model.for_vocabularies(*folder.index.vocab_sizes)
        read_initial_weights(saved.init_from, model, folder.tokenizer(), vocabulary=saved.init_vocabulary)
    at_once = config.batch.packs_on_a_cpu(world_size=1, passes=config.optimizer.passes)
    packs = next(data.plan.steps(data.plan.start(), _PARTS * at_once)).packs
    kept = [pack.pair_ids[: max(1, int(_PAIRS_KEPT * len(pack.pair_ids)))] for pack in packs if pack]
    write_subset(folder, np.concatenate(kept), scratch / "data")
    optimizer = dataclasses.replace(
        config.optimizer,
        schedule="inverse_sqrt",
        peak_lr=_RATE * learning_rate(config.optimizer.warmup_steps, config),
        min_lr=0.0,
        warmup_steps=round(_WARMUP * _STEPS),
    )
    batch = dataclasses.replace(
        config.batch,
        max_source_tokens=budgets.max_source_tokens,
        max_sentences=budgets.max_sentences,
        packs_per_step=len(packs),
        packs_per_micro_batch=min(len(packs), config.batch.packs_per_micro_batch or at_once),
    )
    return config.changed(
        data=(str(scratch / "data"),),
        data_weights=(),
        run_dir=scratch / "run",
        optimizer=optimizer,
        batch=batch,
        max_steps=_STEPS,
        save_every=_SAVED_AT,
        validate_every=_SAVED_AT,
        validate_sentences=_DECODED,
        best_by="nll",
        validation_command=None,
        profile=None,
        log_every=5,
        patience=0,
        keep_checkpoints=2,
        resume="auto",
        init_from=None,
    )


def _train(config: TrainConfig, world: World, device: torch.device) -> tuple[list[Check], dict[str, Any]]:
    trainer = assemble(config, world, device, quiet=True)
    before = trainer.validators[0].run(trainer.engine, step=0).nll
    trainer.train()
    records = {kind: read_records(config.run_dir, kind) for kind in ("train", "valid", "checkpoint", "end")}
    after, skipped = records["valid"][-1]["nll"], records["end"][-1]["skipped_steps"]
    is_finite = bool(np.isfinite([record["nll"] for record in records["train"]]).all())
    checkpoint = config.run_dir / CHECKPOINTS / step_name(_STEPS)
    problem = checkpoint_problem(checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.iterdir()) / 2**20
    saved = f"{size:,.0f} MiB in {records['checkpoint'][-1]['seconds']:.1f} s, hashes verified"
    falls = Check.that(after < before, name="loss falls", found=f"nll {before:.2f} -> {after:.2f} in {_STEPS} steps")
    text = f"{skipped} skipped because loss or gradient was not finite"
    applied = Check.that(not skipped and is_finite, name="every update applied", found=text)
    whole = Check.that(problem is None, name="saves a complete checkpoint", found=problem or saved)
    return [falls, applied, whole], {**records, "peak": peak_memory_bytes(device) / 2**30}


def _resume_and_decode(config: TrainConfig, world: World, device: torch.device) -> list[Check]:
    """Remove the last checkpoint, resume from the one before, and compare the results."""
    run = config.run_dir
    weights = run / WEIGHTS / f"{step_name(_STEPS)}.safetensors"
    expected = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    ledger = (run / LEDGER_FILE).read_text(encoding="utf-8")
    remove_tree(run / CHECKPOINTS / step_name(_STEPS))
    gc.collect()
    trainer = assemble(config.changed(resume="required"), world, device, quiet=True)
    trainer.train()
    found = load_file(weights)
    apart = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    same_ledger = (run / LEDGER_FILE).read_text(encoding="utf-8") == ledger
    # On CUDA, sums in the attention's backward pass are added in no fixed order.
    limit = 0.0 if device.type == "cpu" else 0.02 * scale
    sentences = "same" if same_ledger else "OTHER"
    weights_are = "bit-identical" if apart == 0 else f"at most {apart:.1e} apart"
    text = f"from step {_SAVED_AT}: {sentences} sentences, weights {weights_are}"
    resumes = Check.that(same_ledger and apart <= limit, name="resumes exactly", found=text)
    return [resumes, _decode(trainer, config)]


def _learn_by_heart(config: TrainConfig, scratch: Path, world: World, device: torch.device) -> Check:
    """Check that gradients reach every part: otherwise a model learns little more than token frequencies."""
    folder = DataFolder.open(config.corpora.data[0])
    write_subset(folder, np.arange(min(_HEART_PAIRS, folder.train.info.pairs)), scratch / "heart")
    split = DataFolder.open(scratch / "heart").train
    batch = dataclasses.replace(
        config.batch,
        max_source_tokens=split.info.source_tokens,
        max_target_tokens=split.info.target_tokens,
        packs_per_step=1,
        packs_per_micro_batch=1,
    )
    heart = config.changed(
        data=(str(scratch / "heart"),),
        run_dir=scratch / "heart_run",
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=round(_WARMUP * _HEART_STEPS)),
        batch=batch,
        max_steps=_HEART_STEPS,
        save_every=_HEART_STEPS,
        validate_every=_HEART_STEPS,
        validate_sentences=1,
    )
    trainer = assemble(heart, world, device, quiet=True)
    trainer.train()
    nll = read_records(heart.run_dir, "valid")[-1]["nll"]
    entropy = _token_entropy(split)
    return Check.that(
        nll < _HEART_SHARE * entropy,
        name="memorizes sentences",
        found=f"{split.info.pairs} sentences in {_HEART_STEPS} steps: nll {nll:.2f} (must be below "
        f"{_HEART_SHARE * entropy:.2f}; word frequencies alone reach {entropy:.2f})",
    )


def _token_entropy(split: Split) -> float:
    """Compute the entropy in nats of the target tokens, with the end of each sentence."""
    _, _, values, lengths = split.tokens(np.arange(split.info.pairs))
    counts = np.append(np.unique(values, return_counts=True)[1], len(lengths))
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@torch.no_grad()
def _decode(trainer: Trainer, config: TrainConfig) -> Check:
    """Check that beam search and the training path give the same log probability for beam search's outputs."""
    split = trainer.data.first.valid
    values, lengths, *_ = split.tokens(np.arange(min(_DECODED, split.info.pairs)))
    sources = [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])]
    model = trainer.engine.plain_model()
    outputs = [found[0] for found in beam_search(model, sources, settings=Decoding())]
    device, rows = trainer.engine.device, [output.tokens for output in outputs]
    batch = PackedBatch(
        source=pack_sentences([[*source, EOS_ID] for source in sources], device),
        target=pack_sentences([[BOS_ID, *row] for row in rows], device),
        labels_T=torch.tensor([i for row in rows for i in (*row, EOS_ID)], device=device),
    )
    model.eval()
    nll = float(model(batch, 0.0).nll)
    model.train()
    expected = -sum(output.log_probability for output in outputs)
    apart = abs(nll - expected) / max(expected, 1.0)
    return Check.that(
        apart <= _TOLERANCE[config.arithmetic],
        name="decodes as it trains",
        found=f"{len(sources)} sentences by beam search, log probabilities {100 * apart:.3f}% apart",
    )


def _print_measures(config: TrainConfig, records: dict[str, Any], device: torch.device) -> None:
    batch = config.batch
    # The first intervals include the warm-up of caches and compilers.
    speed = median(record["target_tokens_per_second"] for record in records["train"][2:])
    tokens = batch.packs_per_step * batch.max_target_tokens
    hours = tokens * config.max_steps / speed / 3600
    name, memory = "CPU", "memory of this process"
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), "GPU memory"
    most = batch.packs_per_step
    several, alone = batch.accumulation_steps(min(8, most)), batch.accumulation_steps(1)
    rows = (
        ("device", f"{name}, {config.arithmetic}"),
        ("peak memory", f"{records['peak']:.2f} GiB of {memory}, {batch.packs_at_once} pack(s) at a time"),
        ("speed", f"{speed:,.0f} target tokens/s"),
        ("effective batch", f"{batch.packs_per_step} packs, at most {tokens:,} target tokens per step"),
        ("accumulation", f"{alone} on 1 process, {several} on {min(8, most)}; at most {most} processes"),
        ("the whole run", f"{config.max_steps:,} steps: {hours:,.1f} hours on one such process, at this speed"),
    )
    say()
    for title, value in rows:
        say(f"{title:16} {value}")
    say()
