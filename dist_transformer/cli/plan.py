"""Predict what a training run needs: memory by ZeRO stage, time, jobs, disk and epochs, before anything is queued.

dist-transformer plan --preset big --nodes 2 --gpus 8 --gpu h100
dist-transformer plan --against runs/mine

Takes the flags of training. Memory follows from what DeepSpeed allocates. Speed comes from a model, not a measurement:
a given share of the GPU's peak (--mfu), and the launches of kernels. For a CPU no speed is predicted: `train
--test-mode` measures this machine. --against compares the measurements of a run folder with the predictions for its
settings and machine. The exit status is 1 if the run would not fit.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import write_file
from dist_transformer.base.templates import fill
from dist_transformer.config.command_line import Page
from dist_transformer.config.flags import Start, default_of, read_training, refuse_without_effect
from dist_transformer.config.schema import FLAT, settings_of
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.cost.hardware import ENOUGH, LINK_LATENCY, NETWORK_LATENCY, Cluster
from dist_transformer.data.vocabulary.tokenizer import show_sizes
from dist_transformer.run.outputs import claim_file

if TYPE_CHECKING:
    from dist_transformer.preflight.run_plan import Comparison, RunPlan

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Comparisons, and the file for the plan."""

    start: Annotated[Start, FLAT] = field(default_factory=Start)
    cluster: Annotated[Cluster, FLAT] = field(default_factory=Cluster)
    against: Path | None = None
    """Run folder: plan its settings on its machine, and compare with what it measured."""
    json: Path | None = None
    """File for the plan as JSON."""
    train: Annotated[TrainConfig, FLAT]


def main() -> None:
    settings = parse_arguments()

    from dist_transformer.preflight.run_plan import compare_run, plan_run
    from dist_transformer.training.engine.ds_config import load_ds_config
    from dist_transformer.training.introduction import cautions

    config = settings.train
    inputs = (*config.corpora.data, config.deepspeed_config, config.checkpoints.init_from, settings.against)
    claim_file(settings.json, "--json", inputs)
    rows: list[Comparison] = []
    if settings.against is None:
        plan = plan_run(config, settings.cluster, load_ds_config(config.deepspeed_config))
    else:
        plan, rows = compare_run(settings.against)
    say(screen(plan, rows))
    for caution in cautions(plan.config, epochs=plan.epochs, target_tokens=plan.work.corpus_target_tokens):
        say(f"warning: {caution}", file=sys.stderr)
    if settings.json is not None:
        write_json(settings.json, plan, rows)
    refuse_what_does_not_fit(plan)


def parse_arguments(words: Sequence[str] | None = None) -> PlanSettings:
    own = [each.name for each in settings_of(Cluster)] + ["against", "json"]
    page = Page(text=__doc__, common=["preset", *own, "data", "max_steps", "batch.target_tokens_per_step"])
    stated = read_training(settings_of(PlanSettings), sys.argv[1:] if words is None else words, page)
    if stated.values.get("against") is not None and stated.values.keys() - {"against", "json"}:
        raise UserError("--against takes settings and machine from the run: pass no flag with it except --json")
    default = PlanSettings(train=default_of(stated).changed(data=EMBEDDED_CORPUS))
    settings = stated.build(PlanSettings, default)
    refuse_without_effect(stated.written, settings.train)
    return settings


def screen(plan: "RunPlan", comparisons: "list[Comparison]") -> str:
    """Return what the command prints."""
    return fill(
        Path(__file__).parents[1] / "preflight" / "plan.txt.j2",
        filters={
            "count": "{:,.0f}".format,
            "gib": lambda count: f"{count / _GIB:,.2f}",
            "ms": lambda seconds: f"{1000 * seconds:,.1f}",
            "shown": lambda value: "—" if value is None else f"{value:,.{0 if value >= 100 else 2}f}",
            "sizes": show_sizes,
        },
        plan=plan,
        comparisons=comparisons,
        gib=_GIB,
        enough=ENOUGH,
        link_latency=LINK_LATENCY,
        network_latency=NETWORK_LATENCY,
    ).rstrip("\n")


def write_json(path: Path, plan: "RunPlan", comparisons: "list[Comparison]") -> None:
    figures = ("parameters", "target_tokens_per_step", "target_tokens_per_second", "hours", "jobs", "epochs")
    values: dict[str, Any] = {
        "cluster": dataclasses.asdict(plan.cluster),
        "workload": dataclasses.asdict(plan.work),
        "zero_stage": plan.chosen.zero.stage,
        "stages": [
            {"name": stage.zero.name, "fits": stage.fits, "needed": stage.memory.needed, "peak": stage.memory.peak}
            | dataclasses.asdict(stage.memory)
            for stage in plan.stages
        ],
        "speed_is": "a model, not a measurement",
        "step_seconds": plan.step_time and dataclasses.asdict(plan.step_time) | {"total": plan.step_time.total},
        "best": plan.best and dataclasses.asdict(plan.best),
        **{name: getattr(plan, name) for name in (*figures, "training_flops", "disk_bytes")},
        "comparison": [dataclasses.asdict(row) for row in comparisons],
    }
    write_file(path, json.dumps(values, indent=1) + "\n")


def refuse_what_does_not_fit(plan: "RunPlan") -> None:
    from dist_transformer.preflight.run_plan import what_would_fit

    if plan.chosen.fits is not False:
        return
    remedy, stage = what_would_fit(plan), plan.chosen
    train = (
        f"train with {remedy}" if remedy else "no setting makes it fit: use a GPU with more memory, or a smaller model"
    )
    needed = f"{stage.zero.name} needs {stage.memory.needed / _GIB:.1f} GiB per GPU"
    raise UserError(f"the run does not fit: {needed}; {train}")
