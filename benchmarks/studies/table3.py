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

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import deepspeed_command, overridden
from benchmarks.studies.paper_figures import PAPER, changes
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.config.flags import parse_training
from dist_transformer.config.plain import read_json, to_plain
from dist_transformer.config.presets import PRESETS, VARIANTS, apply_variant
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE, DataIndex
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import perplexity
from dist_transformer.run.environment import describe_environment
from dist_transformer.run.layout import METRICS_FILE, read_records, weight_files
from dist_transformer.runtime.launch import own_command, run_printed

_MACHINE = "{cores} cores of {processor}, {memory_gib} GiB, GPUs: {gpus}; torch {torch}, DeepSpeed {deepspeed}"


def main() -> None:
    arguments = parse_arguments()
    for name in ("ranks", "average"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}: it must be above 0")
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
        write_results(arguments, index, finished, others, table := make_table(finished, others))
    print(table)


def train_flags(row: str, arguments: argparse.Namespace) -> list[str]:
    """Give the flags of the row's training: first those of all rows, then the row's changes."""
    base, config = base_config(row, arguments), row_config(row, arguments)
    changed = []
    for part in ("model", "optimizer"):
        before, after = to_plain(getattr(base, part)), to_plain(getattr(config, part))
        names = [name for name in after if after[name] != before[name]]
        changed += [f"--{part}.{name.replace('_', '-')}={after[name]}" for name in names]
    return [*common_flags(row, arguments), *changed, "--max-steps", str(config.max_steps)]


def common_flags(row: str, arguments: argparse.Namespace) -> list[str]:
    places = ["--data", str(arguments.data), "--run-dir", str(arguments.out / row)]
    return ["--preset", arguments.preset, *places, "--seed", str(arguments.seed), *arguments.flags]


def base_config(row: str, arguments: argparse.Namespace) -> TrainConfig:
    """Parse the settings that replace the paper's base model, with the row's folder."""
    return parse_training(common_flags(row, arguments))[0]


def row_config(row: str, arguments: argparse.Namespace) -> TrainConfig:
    """Apply the row's changes to base. They come after all flags, so `--model.ffn-width` is that of base."""
    config = apply_variant(base_config(row, arguments), row)
    if config.validation.validate_every == 0:
        raise UserError("the table needs a perplexity, and --validate-every is 0: leave it out, or set steps above 0")
    if arguments.max_steps is None:
        return config
    return dataclasses.replace(config, max_steps=round(arguments.max_steps * VARIANTS[row].steps))


def finished_before(row: str, config: TrainConfig, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Read the figures of a row that an earlier call finished with the same settings."""
    record = arguments.out / row / "row.json"
    if not record.exists() or (kept := read_json(record))["settings"] != row_settings(config, arguments):
        return None
    print(f"== {row}: finished before, BLEU {kept['bleu']:.2f}", file=sys.stderr, flush=True)
    return kept


def read_other_seed(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
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


def row_settings(config: TrainConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """List the settings on which a row's figures depend."""
    settings = {name: value for name, value in to_plain(config).items() if name not in {"data", "run_dir"}}
    return {**settings, "average": arguments.average, "data_sha256": sha256_of(arguments.data / "index.json")}


def finish_row(row: str, config: TrainConfig, index: DataIndex, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, average and decode a row, or resume where an earlier call stopped."""
    run = arguments.out / row
    started = time.monotonic()
    check_steps(run, config.max_steps)
    commands = [run_printed(train_command(row, arguments), output=sys.stderr)]
    end = read_records(run, "end")[-1]
    weights = len(weight_files(run))
    flags = ["--run-dir", run, "--out", run / "model", "--last", min(arguments.average, weights)]
    commands.append(run_printed(own_command("average", *flags), output=sys.stderr))
    commands.append(run_printed(evaluate_command(run, index, arguments), output=sys.stderr))
    scores, valid = read_json(run / "bleu.json"), read_records(run, "valid")[-1]
    values = {
        "row": row,
        "change": changes(row_config("base", arguments), config),
        "parameters": count_parameters(config, index.vocab_size),
        "steps": end["step"],
        "nll": valid["nll"],
        "ppl": perplexity(valid["nll"]),
        **{name: scores[name] for name in ("bleu", "signature", "sentences")},
        **{name: end[name] for name in ("train_seconds", "target_tokens_per_second", "training_flops")},
        "wall_seconds": time.monotonic() - started,
        "settings": row_settings(config, arguments),
        "commands": commands,
    }
    write_whole(run / "row.json", json.dumps(values, indent=1) + "\n")
    return values


def check_steps(run: Path, max_steps: int) -> None:
    """Refuse a run folder with more than `max_steps` steps, because training would not change it."""
    saved = read_records(run, "checkpoint") if (run / METRICS_FILE).exists() else []
    if saved and saved[-1]["step"] > max_steps:
        raise UserError(f"{run} has {saved[-1]['step']} steps, this call allows {max_steps}: choose another --out")


def train_command(row: str, arguments: argparse.Namespace) -> list[object]:
    return [
        *deepspeed_command(arguments.ranks),
        "--module",
        "dist_transformer",
        "train",
        *overridden(train_flags(row, arguments)),
    ]


def evaluate_command(run: Path, index: DataIndex, arguments: argparse.Namespace) -> list[object]:
    """Make the command of beam search with the paper's settings, on the validation text as the user gave it."""
    valid = arguments.data / VALID_FOLDER
    files = ["--src", valid / VALID_SOURCE_FILE, "--ref", valid / VALID_TARGET_FILE, "--json", run / "bleu.json"]
    case = ["--lowercase"] if index.lowercase else []
    words = ["evaluate", "--model", run / "model", *files, *case]
    return [*deepspeed_command(arguments.ranks), "--no_local_rank", "--module", "dist_transformer", *words]


def count_parameters(config: TrainConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config.model, vocab_size=vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())


def direction(difference: float, paper: float, *, threshold: float) -> str:
    """Decide whether a row differs from base as in the paper: `yes`, `no`, or `within noise` below the threshold."""
    if abs(difference) < threshold:
        return "within noise"
    return "yes" if difference * paper > 0 or difference == paper == 0 else "no"


def bleu_of_base(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[float, float]:
    """Return mean and standard deviation of base's BLEU over its seeds. The deviation of a single seed counts as 0."""
    scores = [row["bleu"] for row in (rows[0], *others)]
    return statistics.mean(scores), statistics.stdev(scores) if others else 0.0


def compare(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its BLEU difference from base, the paper's, and whether they agree.

    Args:
        rows: finished rows; the first is base.
        others: base with other seeds.
    """
    base = PAPER["base"]
    mean, noise = bleu_of_base(rows, others)
    compared = []
    for row in rows:
        paper = PAPER[row["row"]]
        ours, theirs = row["bleu"] - mean, round(paper.bleu - base.bleu, 1)
        figures = {"bleu_difference": ours, "paper_bleu_difference": theirs}
        agrees = None if row["row"] == "base" else direction(ours, theirs, threshold=2 * noise)
        compared.append({**row, **figures, "paper": dataclasses.asdict(paper), "same_direction": agrees})
    return compared


def make_table(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Make the Markdown table of finished rows, base first."""
    lines = [
        "| row | change | parameters | dev ppl | dev BLEU | difference | the paper's | same direction? |",
        "|---|---|---|---|---|---|---|---|",
    ]
    mean, noise = bleu_of_base(rows, others)
    for row in compare(rows, others):
        ppl, bleu = f"{row['ppl']:.2f}", f"{row['bleu']:.1f}"
        if row["row"] == "base" and others:
            ppl = f"{statistics.mean(seed['ppl'] for seed in (row, *others)):.2f}"
            bleu = f"{mean:.1f} ± {noise:.1f}"
        cells = [row["row"], row["change"], f"{row['parameters'] / 1e6:.2f}M", ppl, bleu]
        if row["same_direction"] is None:
            cells += ["", "", ""]
        else:
            differences = (row["bleu_difference"], row["paper_bleu_difference"])
            cells += [*(f"{value:+.1f}" for value in differences), row["same_direction"]]
        lines.append(f"| {' | '.join(cells)} |")
    if others:
        reference, threshold = (
            f"the mean of {1 + len(others)} seeds of base",
            f"{2 * noise:.2f} BLEU, twice their spread",
        )
    else:
        reference, threshold = "base", "none, because base has one seed"
    lines += ["", f"Differences are in BLEU, from {reference}. Threshold for `within noise`: {threshold}."]
    if any(row["row"].startswith("B") for row in rows):
        lines += ["", "Rows B narrow the values together with the keys; the paper narrows only queries and keys."]
    return "\n".join(lines)


def write_results(
    arguments: argparse.Namespace,
    index: DataIndex,
    rows: list[dict[str, Any]],
    others: list[dict[str, Any]],
    table: str,
) -> None:
    """Write DIR/table3.md and DIR/table3.json."""
    compared = compare(rows, others)
    verdicts = [row["same_direction"] for row in compared if row["same_direction"] is not None]
    counts = {verdict: verdicts.count(verdict) for verdict in ("yes", "no", "within noise")}
    machine = describe_environment()
    machine["gpus"] = ", ".join(machine["gpus"]) or "none"
    result = {
        "what": "rows of the paper's Table 3, relative to the preset; perplexity and BLEU compared with the paper's",
        "corpus": f"{index.corpus} ({index.source_language}-{index.target_language})",
        "synthetic": index.synthetic,
        "date": datetime.date.today().isoformat(),
        "machine": _MACHINE.format(**machine),
        "commands": [command for row in (*rows, *others) for command in row["commands"]],
        "seeds": [arguments.seed, *(seed["settings"]["seed"] for seed in others)],
        "wall_seconds": sum(row["wall_seconds"] for row in (*rows, *others)),
        "figures": {
            "preset": arguments.preset,
            "base_bleu": bleu_of_base(rows, others)[0],
            "noise_bleu": bleu_of_base(rows, others)[1],
            "base_of_other_seeds": others,
            "compared": len(verdicts),
            "verdicts": counts,
            "base_steps": rows[0]["steps"],
            "rows": compared,
        },
        "rows": [],
    }
    write_whole(arguments.out / "table3.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_whole(arguments.out / "table3.md", table + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole: readers find the old file or the new one, even after an interruption."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the rows and the table")
    parser.add_argument("--preset", default="multi30k", help="replaces the paper's base model (default: %(default)s)")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(VARIANTS),
        metavar="ROW",
        help=f"rows among {', '.join(VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="optimizer steps of base; big takes three times as many (default: the preset's)",
    )
    parser.add_argument(
        "--flags-of", metavar="ROW", help="print the flags of this row's training, one per line, and exit"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order and dropout (default: %(default)s)")
    parser.add_argument(
        "--average", type=int, default=5, metavar="N", help="weight files averaged for BLEU (default: %(default)s)"
    )
    parser.add_argument(
        "--other-seeds",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of calls with another --seed, whose row base is trained; they show the noise between seeds",
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of dist-transformer train for every row")
    return parser.parse_args()
