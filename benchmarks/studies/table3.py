"""Train rows of the paper's Table 3, and compare their dev perplexity and BLEU with the paper's.

tools/table3.py --data DATA --out SECOND --preset multi30k --max-steps 1500 --rows base --seed 2
tools/table3.py --data DATA --out DIR --preset multi30k --max-steps 1500 --rows A1 C1 D1 --other-seeds SECOND
tools/table3.py --data DATA --out DIR --preset multi30k --max-steps 800 -- --optimizer.warmup-steps 200

A row changes the preset as the paper's row changes its base model. The row `base` is always included. Flags after `--`
change the preset for all rows, before a row changes it. DIR/ROW is the row's run folder. Run the command again after an
interruption or with other rows: finished rows stay in the table, and an unfinished row resumes from its checkpoint.
--other-seeds names folders of such calls with another --seed: rows are then compared with the mean of all seeds of
base, and a difference below twice their standard deviation is called noise.
--flags-of ROW prints the flags of the row's training, to start it in another way (slurm/ablations.sh). DIR/table3.md
and DIR/table3.json (in the layout of tools/results_table.py) are written after every row. Perplexity is that of the
last weights. BLEU is that of the mean of the last --average weight files (1, as in the paper, averages nothing).
"""

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import deepspeed_command, overridden
from benchmarks.measure import read_flags, result_of, write_result
from benchmarks.rows import markdown_table
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of, write_file
from dist_transformer.config.flags import parse_training
from dist_transformer.config.plain import read_json, to_plain
from dist_transformer.config.presets import PRESETS, VARIANTS, apply_variant
from dist_transformer.config.schema import setting
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE, DataIndex
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import perplexity
from dist_transformer.run.layout import METRICS_FILE, read_records, weight_files
from dist_transformer.runtime.launch import own_command, run_printed


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """The paper's results for a row: newstest2013 English-German, beam search, no averaging of checkpoints."""

    perplexity: float
    """Perplexity per token, with 37k byte pairs."""
    bleu: float
    parameters: int | None = None
    """Millions of parameters; None if the paper leaves the column empty because they are about those of base."""


PAPER: dict[str, PaperFigures] = {
    "base": PaperFigures(4.92, 25.8, 65),
    "A1": PaperFigures(5.29, 24.9),
    "A2": PaperFigures(5.00, 25.5),
    "A3": PaperFigures(4.91, 25.8),
    "A4": PaperFigures(5.01, 25.4),
    "B1": PaperFigures(5.16, 25.1, 58),
    "B2": PaperFigures(5.01, 25.4, 60),
    "C1": PaperFigures(6.11, 23.7, 36),
    "C2": PaperFigures(5.19, 25.3, 50),
    "C3": PaperFigures(4.88, 25.5, 80),
    "C4": PaperFigures(5.75, 24.5, 28),
    "C5": PaperFigures(4.66, 26.0, 168),
    "C6": PaperFigures(5.12, 25.4, 53),
    "C7": PaperFigures(4.75, 26.2, 90),
    "D1": PaperFigures(5.77, 24.6),
    "D2": PaperFigures(4.95, 25.5),
    "D3": PaperFigures(4.67, 25.3),
    "D4": PaperFigures(5.47, 25.7),
    "E": PaperFigures(4.92, 25.7),
    "big": PaperFigures(4.33, 26.4, 213),
}
"""Table 3 of the proceedings (NeurIPS 2017, arXiv 1706.03762)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    data: Path
    """Data folder."""
    out: Path
    """Folder of the rows and the table."""
    preset: str = "multi30k"
    """Preset in place of the paper's base model."""
    rows: tuple[str, ...] = tuple(VARIANTS)
    """Rows of the table."""
    max_steps: int | None = None
    """Optimizer steps of base; big takes three times as many; default: the preset's."""
    flags_of: str | None = None
    """Print the flags of this row's training, one per line, and exit."""
    ranks: int = 2
    """Processes."""
    seed: int = 1
    """Seed of weights, order and dropout."""
    average: int = 5
    """Weight files averaged for BLEU."""
    other_seeds: tuple[Path, ...] = ()
    """Folders of calls with another seed, whose row base is trained; they show the noise between seeds."""
    flags: tuple[str, ...] = setting(default=(), python_only=True)


def main() -> None:
    arguments = read_flags(Settings)
    for row in arguments.rows:
        apply_variant(PRESETS["base"], row)
    if arguments.flags_of is not None:
        print("\n".join(train_flags(arguments.flags_of, arguments)))
        return
    index = DataFolder.open(arguments.data).index
    others = [read_other_seed(folder, arguments) for folder in arguments.other_seeds]
    finished: list[dict[str, Any]] = []
    for row in VARIANTS:
        config = row_config(row, arguments)
        kept = finished_before(row, config, arguments)
        if kept is None and row not in {"base", *arguments.rows}:
            continue
        finished.append(kept or finish_row(row, config, index, arguments))
        figures = compare(finished, others)
        table = make_table(figures)
        write_results(arguments, index, figures, table)
    print(table)


def train_flags(row: str, arguments: Settings) -> list[str]:
    """Give the flags of the row's training: first those of all rows, then the row's changes."""
    base, config = base_config(row, arguments), row_config(row, arguments)
    changed = []
    for part in ("model", "optimizer"):
        before, after = to_plain(getattr(base, part)), to_plain(getattr(config, part))
        names = [name for name in after if after[name] != before[name]]
        changed += [f"--{part}.{name.replace('_', '-')}={after[name]}" for name in names]
    return [*common_flags(row, arguments), *changed, "--max-steps", str(config.max_steps)]


def common_flags(row: str, arguments: Settings) -> list[str]:
    places = ["--data", str(arguments.data), "--run-dir", str(arguments.out / row)]
    return ["--preset", arguments.preset, *places, "--seed", str(arguments.seed), *arguments.flags]


def base_config(row: str, arguments: Settings) -> TrainConfig:
    """Parse the settings that replace the paper's base model, with the row's folder."""
    return parse_training(common_flags(row, arguments))[0]


def row_config(row: str, arguments: Settings) -> TrainConfig:
    """Apply the row's changes to base. They come after all flags, so `--model.ffn-width` is that of base."""
    config = apply_variant(base_config(row, arguments), row)
    if config.validation.validate_every == 0:
        raise UserError("the table needs a perplexity, and --validate-every is 0: leave it out, or set steps above 0")
    if arguments.max_steps is None:
        return config
    return dataclasses.replace(config, max_steps=round(arguments.max_steps * VARIANTS[row].steps))


def finished_before(row: str, config: TrainConfig, arguments: Settings) -> dict[str, Any] | None:
    """Read the figures of a row that an earlier call finished with the same settings."""
    record = arguments.out / row / "row.json"
    if not record.exists() or (kept := read_json(record))["settings"] != row_settings(config, arguments):
        return None
    print(f"== {row}: finished before, BLEU {kept['bleu']:.2f}", file=sys.stderr, flush=True)
    return kept


def read_other_seed(folder: Path, arguments: Settings) -> dict[str, Any]:
    """Read the figures of base from the folder of a call with another seed.

    Raises:
        UserError: base is missing there, or differs in more than its seed.
    """
    record = folder / "base" / "row.json"
    if not record.exists():
        raise UserError(f"--other-seeds {folder} holds no finished row `base`: train it with --rows base --seed N")
    kept = read_json(record)
    wanted = row_settings(row_config("base", arguments), arguments)
    differing = [name for name in wanted if kept["settings"].get(name) != wanted[name]]
    if "seed" not in differing:
        raise UserError(f"--other-seeds {folder} was trained with the same seed: pass another --seed there")
    if len(differing) > 1:
        others = ", ".join(name for name in differing if name != "seed")
        raise UserError(f"--other-seeds {folder} was trained with another {others}: only the seed may differ")
    found: dict[str, Any] = kept
    return found


def row_settings(config: TrainConfig, arguments: Settings) -> dict[str, Any]:
    """List the settings on which a row's figures depend."""
    settings = {name: value for name, value in to_plain(config).items() if name not in {"data", "run_dir"}}
    return {**settings, "average": arguments.average, "data_sha256": sha256_of(arguments.data / "index.json")}


def finish_row(row: str, config: TrainConfig, index: DataIndex, arguments: Settings) -> dict[str, Any]:
    """Train, average and decode a row, or resume where an earlier call stopped."""
    run = arguments.out / row
    started = time.monotonic()
    saved = read_records(run, "checkpoint") if (run / METRICS_FILE).exists() else []
    if saved and saved[-1]["step"] > config.max_steps:
        # Training would not change it.
        raise UserError(
            f"{run} has {saved[-1]['step']} steps, this call allows {config.max_steps}: choose another --out"
        )
    launcher, module = deepspeed_command(arguments.ranks), ["--module", "dist_transformer"]
    training = overridden(train_flags(row, arguments))
    commands = [run_printed([*launcher, *module, "train", *training], output=sys.stderr)]
    end = read_records(run, "end")[-1]
    weights = len(weight_files(run))
    flags = ["--run-dir", run, "--out", run / "model", "--last", min(arguments.average, weights)]
    commands.append(run_printed(own_command("average", *flags), output=sys.stderr))
    # Beam search with the paper's settings, on the validation text as the user gave it.
    valid, case = arguments.data / VALID_FOLDER, ["--lowercase"] if index.lowercase else []
    files = ["--src", valid / VALID_SOURCE_FILE, "--ref", valid / VALID_TARGET_FILE, "--json", run / "bleu.json"]
    evaluation = ["evaluate", "--model", run / "model", *files, *case]
    launcher = [*deepspeed_command(arguments.ranks), "--no_local_rank"]
    commands.append(run_printed([*launcher, *module, *evaluation], output=sys.stderr))
    scores, nll = read_json(run / "bleu.json"), read_records(run, "valid")[-1]["nll"]
    values = {
        "row": row,
        "change": changes(row_config("base", arguments), config),
        "parameters": count_parameters(config, index.vocab_size),
        "steps": end["step"],
        "nll": nll,
        "ppl": perplexity(nll),
        **{name: scores[name] for name in ("bleu", "signature", "sentences")},
        **{name: end[name] for name in ("train_seconds", "target_tokens_per_second", "training_flops")},
        "wall_seconds": time.monotonic() - started,
        "settings": row_settings(config, arguments),
        "commands": commands,
    }
    write_file(run / "row.json", json.dumps(values, indent=1) + "\n")
    return values


def count_parameters(config: TrainConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config.model, vocab_size=vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())


def changes(base: TrainConfig, config: TrainConfig) -> str:
    """Describe how `config` differs from `base` in settings of rows: `heads 4 → 8, head width 32 → 16`, or `-`."""
    before, after = _settings(base), _settings(config)
    return ", ".join(f"{name} {before[name]} → {after[name]}" for name in before if before[name] != after[name]) or "-"


def _settings(config: TrainConfig) -> dict[str, object]:
    """Return the settings that rows may change, by the names that reports use."""
    model, optimizer = config.model, config.optimizer
    settings: dict[str, object] = {
        "layers": f"{model.encoder_layers}+{model.decoder_layers}",
        "width": model.width,
        "feed-forward width": model.ffn_width,
        "heads": model.heads,
        "head width": model.attention_head_width,
        "dropout": model.dropout,
        "label smoothing": optimizer.label_smoothing,
        "positions": model.positions,
        "steps": config.max_steps,
    }
    if optimizer.schedule != "noam":
        settings["peak rate"] = f"{optimizer.peak_lr:.2g}"
    return settings


def direction(difference: float, paper: float, *, threshold: float) -> str:
    """Decide whether a row differs from base as in the paper: `yes`, `no`, or `within noise` below the threshold."""
    if abs(difference) < threshold:
        return "within noise"
    return "yes" if difference * paper > 0 or difference == paper == 0 else "no"


def compare(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the table: each row's BLEU difference from base, the paper's, and whether they agree.

    The noise is the standard deviation of base's BLEU over its seeds; that of a single seed counts as 0.

    Args:
        rows: finished rows; the first is base.
        others: base with other seeds.
    """
    seeds = [rows[0], *others]
    mean = statistics.mean(seed["bleu"] for seed in seeds)
    noise = statistics.stdev(seed["bleu"] for seed in seeds) if others else 0.0
    compared, verdicts = [], dict.fromkeys(("yes", "no", "within noise"), 0)
    for row in rows:
        paper = PAPER[row["row"]]
        ours, theirs = row["bleu"] - mean, round(paper.bleu - PAPER["base"].bleu, 1)
        agrees = None
        if row["row"] != "base":
            agrees = direction(ours, theirs, threshold=2 * noise)
            verdicts[agrees] += 1
        figures = {"bleu_difference": ours, "paper_bleu_difference": theirs, "same_direction": agrees}
        compared.append({**row, **figures, "paper": dataclasses.asdict(paper)})
    return {
        "base_bleu": mean,
        "noise_bleu": noise,
        "base_of_other_seeds": others,
        "compared": sum(verdicts.values()),
        "verdicts": verdicts,
        "base_steps": rows[0]["steps"],
        "rows": compared,
    }


def make_table(figures: dict[str, Any]) -> str:
    """Make the Markdown table of finished rows, base first."""
    columns = ("row", "change", "parameters", "dev ppl", "dev BLEU", "difference", "the paper's", "same direction?")
    made, others, noise = [], figures["base_of_other_seeds"], figures["noise_bleu"]
    for row in figures["rows"]:
        ppl, bleu, compared = row["ppl"], f"{row['bleu']:.1f}", ["", "", ""]
        if row["row"] != "base":
            differences = (row["bleu_difference"], row["paper_bleu_difference"])
            compared = [*(f"{value:+.1f}" for value in differences), row["same_direction"]]
        elif others:
            ppl, bleu = (
                statistics.mean(seed["ppl"] for seed in (row, *others)),
                f"{figures['base_bleu']:.1f} ± {noise:.1f}",
            )
        made.append([row["row"], row["change"], f"{row['parameters'] / 1e6:.2f}M", f"{ppl:.2f}", bleu, *compared])
    reference, threshold = "base", "none, because base has one seed"
    if others:
        reference = f"the mean of {1 + len(others)} seeds of base"
        threshold = f"{2 * noise:.2f} BLEU, twice their spread"
    lines = [
        markdown_table(columns, made),
        "",
        f"Differences are in BLEU, from {reference}. Threshold for `within noise`: {threshold}.",
    ]
    if any(row["row"].startswith("B") for row in figures["rows"]):
        lines += ["", "Rows B narrow the values together with the keys; the paper narrows only queries and keys."]
    return "\n".join(lines)


def write_results(arguments: Settings, index: DataIndex, figures: dict[str, Any], table: str) -> None:
    """Write DIR/table3.md and DIR/table3.json."""
    others = figures["base_of_other_seeds"]
    trained = (*figures["rows"], *others)
    result = result_of(
        index,
        what="rows of the paper's Table 3, relative to the preset; perplexity and BLEU compared with the paper's",
        command=[command for row in trained for command in row["commands"]],
        seeds=[arguments.seed, *(seed["settings"]["seed"] for seed in others)],
        wall_seconds=sum(row["wall_seconds"] for row in trained),
        figures={"preset": arguments.preset, **figures},
    )
    write_result(arguments.out / "table3.json", result)
    write_file(arguments.out / "table3.md", table + "\n")
