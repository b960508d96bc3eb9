"""Run by 2 ranks of DeepSpeed: what must hold for every ZeRO stage and precision, in one launch.

Usage: worker_stages.py DATA OUT NAME… Rank 0 writes OUT/results.json with the named results; the tests read it.
"""

import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.collate import Collator
from dist_transformer.data.loading.plan import Plan, Position, Step, resolve_budgets
from dist_transformer.evaluation.samples import read_sheets
from dist_transformer.model.freezing import frozen_names
from dist_transformer.model.loss import LossSums
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.layout import read_records
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.assembly import assemble
from dist_transformer.training.engine import state_tensors
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
STAGES = range(4)
MODEL = ModelConfig(width=32, heads=2, ffn_width=64, encoder_layers=2, decoder_layers=1, dropout=0.0)


# The warm-up of the average ends at step 3: (1 + 3) / (10 + 3) is above.
DECAY = 0.3
FROZEN = ("embeddings", "encoder.0", "decoder.*.norm.*")
OFFLOAD = "zero3_offload" if shutil.which("c++") else "zero3"
# The default, and the stage that averages gradients and gathers weights.
RDROP = ((1, "bf16"), (3, "fp32"))


def stages_of(case: str) -> tuple[str, ...]:
    """Give stages of which each hands over to the next after one step, and the last to the first.

    The offload is in the cases of a slice, because DeepSpeed compiles it for minutes.
    """
    return ("zero0", "zero1", "zero2", "zero3", OFFLOAD if case in ("chain-bf16", "frozen-fp32") else "zero3", "zero0")


def ds_config_path(name: str) -> Path:
    return ROOT / "ds_configs" / f"{name}.json"


def make_config(data: Path, run_dir: Path, ds_config: str, precision: str, *, dropout: float = 0.1) -> TrainConfig:
    return TrainConfig.of(
        data=(str(data),),
        run_dir=run_dir,
        deepspeed_config=ds_config_path(ds_config),
        ema_decay=DECAY,
        max_steps=6,
        save_every=3,
        log_every=1,
        # What validation computes in bf16 is that of the same model.
        validate_every=3 if precision == "fp32" else 0,
        validate_sentences=6,
        precision=precision,  # type: ignore[arg-type]
        model=dataclasses.replace(MODEL, dropout=dropout),
        # Three packs on two ranks: two micro-batches each, one of them of weight zero.
        batch=BatchConfig(max_target_tokens=192, packs_per_step=3),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-3, warmup_steps=4),
    )


def last_step_of_epoch(plan: Plan, packs_per_step: int) -> Step:
    """A ragged step: some of its packs are missing."""
    last = None
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            assert last is not None
            return last
        last = step
    raise AssertionError("a plan has no end")


def reference_gradient(
    model: Transformer, step: Step, streams: tuple[Collator, Collator], config: TrainConfig
) -> dict[str, Any]:
    """The step's gradient without DeepSpeed, summed in fp32.

    fp32: one big batch. bf16: pack by pack, because rounding inside a backward pass depends on what it holds; compared
    are then accumulation, reduction and scaling. R-Drop: pack by pack, because the masks depend on the pack.
    """
    alpha = config.optimizer.rdrop_alpha
    single, whole = streams
    reference = Transformer(model.config)
    reference.load_state_dict(model.state_dict())
    if config.precision == "fp32" and not alpha:
        (reference(whole.build(step.packs), 0.1).loss / step.target_tokens).backward()
        return {name: p.grad for name, p in reference.named_parameters()}
    if config.precision == "bf16":
        reference.cast_parameters(torch.bfloat16)
    if config.deepspeed_config == ds_config_path("zero0"):
        # The gradients of the shared embedding's uses are added in fp32 at stage 0, in bf16 at the others.
        for p in reference.parameters():
            p.grad_dtype = torch.float32
    total = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for number in range(len(step.packs)):
        reference.zero_grad()
        torch.manual_seed(number)
        sums = reference(single.build(step.packs[number : number + 1]), 0.1, alpha)
        (sums.loss / step.target_tokens).backward()
        for name, p in reference.named_parameters():
            assert p.grad is not None
            total[name] += p.grad.float()
    return total


def gradient_errors(config: TrainConfig, world: World, device: torch.device) -> dict[str, float]:
    """Relative error of each trained tensor's gradient, and of their norm; the worse of a full and a ragged step.

    After one update Adam's first moment is (1 - β1) · gradient: what the optimizer really saw.
    """
    folder = DataFolder.open(config.corpora.data[0])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=folder.index.vocab_size))
    frozen = frozen_names(dict(Transformer(config.model).named_parameters()), config.freeze)
    info = folder.train.info
    budgets = resolve_budgets(config.batch, source_tokens=info.source_tokens, target_tokens=info.target_tokens)
    plan = Plan(folder.train.lengths, folder.train.shard_starts, budgets=budgets, window_shards=2, seed=1)
    packs = config.batch.packs_per_step
    stream = Collator(folder.train, budgets, packs_per_micro_batch=1)
    whole = Collator(folder.train, budgets, packs_per_micro_batch=packs)
    errors: dict[str, float] = {}
    for step in (next(plan.steps(Position(), packs)), last_step_of_epoch(plan, packs)):
        torch.manual_seed(3)
        model = Transformer(config.model)
        wanted = reference_gradient(model, step, (stream, whole), config)
        engine = Engine(model, config, load_ds_config(config.deepspeed_config), world_size=world.size)
        for micro in stream.micro_batches(step, rank=world.rank, world_size=world.size):
            torch.manual_seed(micro.first_pack)
            engine.forward_backward(micro.batch.to(device), step_tokens=step.target_tokens)
            engine.end_micro_batch()
        squares = 0.0
        for state in engine.parameter_states():
            if state.name not in frozen:
                gradient, expected = state.moments["exp_avg"] / (1 - config.optimizer.beta1), wanted[state.name]
                error = float((gradient - expected).norm() / expected.norm())
                errors[state.name] = max(errors.get(state.name, 0.0), error)
                squares += float(expected.double().square().sum())
        error = abs(engine.gradient_norm / squares**0.5 - 1)
        errors["norm"] = max(errors.get("norm", 0.0), error)
    return errors


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {state.name: state.weight.clone() for state in trainer.engine.parameter_states()}


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, moments and averages."""
    tensors = {}
    for state in trainer.engine.parameter_states():
        tensors[f"weight/{state.name}"] = state.weight.clone()
        tensors.update({f"{key}/{state.name}": value.clone() for key, value in state.moments.items()})
    return tensors


def plain_weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().float() for name, p in trainer.engine.plain_model().named_parameters()}


def losses_of(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_records(run_dir, "train")]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def resume_result(config: TrainConfig, world: World, device: torch.device) -> dict[str, Any]:
    """All steps at once, against a half, a new engine, and the other half."""
    whole = assemble(config, world, device)
    whole.train()
    broken_dir, half = config.run_dir.with_name(config.run_dir.name + "-resumed"), config.max_steps // 2
    # Without validation, which changes nothing.
    config = config.changed(validate_every=0)
    assemble(dataclasses.replace(config, run_dir=broken_dir, max_steps=half), world, device).train()
    resumed = assemble(dataclasses.replace(config, run_dir=broken_dir), world, device)
    assert resumed.progress.step == half
    resumed.train()
    ledgers = [(folder / "ledger.jsonl").read_text() for folder in (config.run_dir, broken_dir)]
    return {
        "losses": losses_of(config.run_dir),
        "resumed_losses": losses_of(broken_dir),
        "weights_differ_by": difference(weights_of(whole), weights_of(resumed)),
        "same_ledger": ledgers[0] == ledgers[1] if world.is_main else True,
        "flops": [trainer.logbook._flops_so_far() for trainer in (whole, resumed)],
        "plain_model_differs_by": difference(weights_of(whole), plain_weights_of(whole)),
        "sheets": [dataclasses.asdict(sheet) for sheet in read_sheets(config.run_dir)],
    }


def rdrop_result(config: TrainConfig, run_dir: Path, world: World, device: torch.device) -> dict[str, Any]:
    """The gradient, and six steps at once against three and three, with R-Drop."""
    config = config.changed(optimizer=dataclasses.replace(config.optimizer, rdrop_alpha=5.0), run_dir=run_dir)
    return {
        "gradient_errors": gradient_errors(config, world, device),
        "resume": resume_result(config, world, device),
    }


def handed_over(config: TrainConfig, run_dir: Path, world: World, device: torch.device) -> list[float]:
    """The losses of the same six steps, each under another stage than the one before."""
    config = config.changed(run_dir=run_dir, validate_every=0)
    for step, name in enumerate(stages_of(run_dir.name), start=1):
        part = dataclasses.replace(config, deepspeed_config=ds_config_path(name), max_steps=step)
        assemble(part, world, device).train()
    return losses_of(run_dir)


def frozen_result(config: TrainConfig, run_dir: Path, world: World, device: torch.device) -> dict[str, Any]:
    """The same six steps with frozen parts, each under another stage: what moves, and what another freezing says."""
    config = config.changed(run_dir=run_dir, validate_every=0, freeze=FROZEN)
    moved, kept = dict[str, float](), 0.0
    for step, stage in enumerate(stages_of(run_dir.name), start=1):
        part = dataclasses.replace(config, deepspeed_config=ds_config_path(stage), max_steps=step)
        trainer = assemble(part, world, device)
        trainer.train()
        state = state_of(trainer)
        torch.manual_seed(trainer.config.seed)
        drawn = {name: p.detach() for name, p in Transformer(trainer.config.model).named_parameters()}
        frozen = frozen_names(drawn, FROZEN)
        moved = {
            name: float((state[f"weight/{name}"] - drawn[name]).abs().max()) for name in drawn if name not in frozen
        }
        # The weights, their average, and the copies that the model computes with.
        computed = plain_weights_of(trainer)
        for name in frozen:
            rounded = drawn[name].bfloat16().float() if config.precision == "bf16" else drawn[name]
            pairs = (
                (state[f"weight/{name}"], drawn[name]),
                (state[f"ema/{name}"], drawn[name]),
                (computed[name], rounded),
            )
            kept = max(kept, *(float((found - wanted).abs().max()) for found, wanted in pairs))
            kept = max(kept, *(float(state[f"{key}/{name}"].abs().max()) for key in ("exp_avg", "exp_avg_sq")))
    message = ""
    try:
        assemble(dataclasses.replace(config, freeze=FROZEN[:1]), world, device)
    except UserError as error:
        message = str(error)
    return {"frozen_differ_by": kept, "least_moved": min(moved.values()), "message": message}


def changed_precision(config: TrainConfig, run_dir: Path, world: World, device: torch.device) -> list[float]:
    """The losses of the same six steps, two in fp32, two in bf16, and two in fp32."""
    config = config.changed(run_dir=run_dir, validate_every=0)
    for step, precision in ((2, "fp32"), (4, "bf16"), (6, "fp32")):
        assemble(dataclasses.replace(config, precision=precision, max_steps=step), world, device).train()
    return losses_of(run_dir)


def moving_average(weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Average the weights before training and after each update, in fp64, by the definition."""
    average = {name: weight.double() for name, weight in weights[0].items()}
    for t, after in enumerate(weights[1:], start=1):
        decay = min(DECAY, (1 + t) / (10 + t))
        average = {name: decay * average[name] + (1 - decay) * after[name].double() for name in average}
    return average


@contextmanager
def poisoned(trainer: Trainer, world: World) -> Iterator[None]:
    """Let rank 1 compute losses that are not numbers."""
    forward = trainer.engine.module.forward

    def poisoned(*inputs: Any) -> LossSums:
        sums = forward(*inputs)
        return sums._replace(loss=sums.loss * float("nan")) if world.rank == 1 else sums

    trainer.engine.module.forward = poisoned  # type: ignore[method-assign]
    yield
    trainer.engine.module.forward = forward  # type: ignore[method-assign]


def not_finite_result(config: TrainConfig, world: World, device: torch.device) -> dict[str, Any]:
    """Four good steps, one that fails on rank 1, which changes nothing, a good one, and three that fail: the end."""
    run_dir = config.run_dir.with_name(config.run_dir.name + "-nan")
    config = dataclasses.replace(config, max_skipped_steps=3)

    def begin(name: str) -> tuple[Trainer, Callable[[bool], None]]:
        trainer = assemble(dataclasses.replace(config, run_dir=run_dir.with_name(run_dir.name + name)), world, device)
        steps = trainer.data.plan.steps(trainer.progress.position, config.batch.packs_per_step)

        def train_step(computes: bool) -> None:
            step = next(steps)
            share = trainer.data.collator.micro_batches(step, rank=world.rank, world_size=world.size)
            if computes:
                trainer._train_step(step, share, stall=0.0)
                trainer.logbook.end_interval()

        return trainer, train_step

    trainer, train_step = begin("")
    weights = [weights_of(trainer)]
    torch.manual_seed(trainer.config.seed)
    drawn = {name: p.detach() for name, p in Transformer(trainer.config.model).named_parameters()}
    updates, rates = [], []
    for _ in range(4):
        train_step(True)
        weights.append(weights_of(trainer))
    before = state_of(trainer)
    expected = moving_average(weights)
    average_error = difference({name: before[f"ema/{name}"] for name in expected}, expected)

    def note() -> None:
        updates.append(trainer.engine.scheduler.updates)
        rates.append(trainer.engine.learning_rate)

    note()
    with poisoned(trainer, world):
        train_step(True)
    note()
    skipped = state_of(trainer)
    train_step(True)
    note()
    # The same without the data of the step that failed.
    other, train_other = begin("-left-out")
    for number in range(6):
        train_other(number != 4)
    after, message = state_of(trainer), ""
    with poisoned(trainer, world):
        for _ in range(3):
            try:
                train_step(True)
            except UserError as error:
                message = str(error)
    return {
        "begins_beside_what_was_drawn": difference(weights[0], drawn),
        "average_error": average_error,
        "average_moved": difference({name: before[f"ema/{name}"] for name in expected}, weights[0]),
        "state_differs_by": max(difference(before, skipped), difference(after, state_of(trainer))),
        "differs_from_a_run_without": difference(after, state_of(other)),
        "updates": updates,
        "rates": rates,
        "skipped": trainer.progress.skipped_steps,
        "message": message,
    }


def main() -> None:
    data, out, *names = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    world = read_world()
    results: dict[str, Any] = {}
    # A fifth of the time, for what test_figures.py tests.
    Reporter.pictures = lambda *_: None  # type: ignore[method-assign]
    # A save has several pieces, whose ends are within the parts of ranks.
    state_tensors.SAVED_AT_ONCE = 5000
    with process_group(world) as device:
        for stage, precision in itertools.product(STAGES, ("fp32", "bf16")):
            name = f"zero{stage}-{precision}"
            config = make_config(data, out / name, f"zero{stage}", precision)
            plain = make_config(data, out / name, f"zero{stage}", precision, dropout=0.0)
            if name in names:
                results[name] = {
                    "gradient_errors": gradient_errors(plain, world, device),
                    "errors_of_frozen": gradient_errors(plain.changed(freeze=FROZEN), world, device),
                    "resume": resume_result(config, world, device),
                    "not_finite": not_finite_result(plain, world, device),
                }
        for precision in ("fp32", "bf16"):
            config = make_config(data, out, "zero0", precision)
            for name, result in ((f"chain-{precision}", handed_over), (f"frozen-{precision}", frozen_result)):
                if name in names:
                    results[name] = result(config, out / name, world, device)
        for stage, precision in RDROP:
            config, name = make_config(data, out, f"zero{stage}", precision), f"rdrop-zero{stage}"
            if name in names:
                results[name] = rdrop_result(config, out / name, world, device)
        config = make_config(data, out, "zero3", "fp32")
        results["precisions"] = changed_precision(config, out / "precisions", world, device)
    if world.is_main:
        (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
