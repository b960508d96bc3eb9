"""Run the whole pipeline on the embedded synthetic corpus: prepare, train on 2 ranks with DeepSpeed, average, decode,
score with BLEU.

It prints each command before it runs it, so that you can repeat it with your own data. An interrupted demo resumes
where it stopped.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.base.files import write_file
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.plain import read_json
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.schema import require_positive
from dist_transformer.run.layout import read_records
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.launch import as_typed, installed_program, own_command, run_printed
from dist_transformer.runtime.world import require_no_launch


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Size of the demo."""

    run_dir: Path = Path("runs/demo")
    """Run folder."""
    processes: int = 2
    """Processes of the training and of the search."""
    train_pairs: int = 25_000
    """Synthetic sentence pairs."""
    max_steps: int = PRESETS["tiny"].max_steps
    """Optimizer steps."""
    average: int | None = None
    """Newest weight files to average; default: as average chooses."""

    def __post_init__(self) -> None:
        # The commands that the demo starts would refuse them only after the work of those before.
        require_positive(self, "processes", "train_pairs", "max_steps", "average")


def main() -> None:
    settings = parse(DemoSettings, Page(text=__doc__))
    require_no_launch("the demo")
    run, ranks = settings.run_dir, settings.processes
    claim_folder(run, "--run-dir", ())
    data, model = run / "data", run / "model"
    if not (data / "index.json").exists():
        flags = ["--toy", settings.train_pairs, "--vocab-size", 1000, "--out", data]
        call("Corpus: synthetic sentences from a small grammar", own_command("prepare", *flags))
    training = ["--preset", "tiny", "--data", data, "--run-dir", run, "--max-steps", str(settings.max_steps)]
    call(f"Training: {ranks} ranks, ZeRO-1", own_command("train", *training, "--processes", ranks))
    number = [] if settings.average is None else ["--last", str(settings.average)]
    call("Mean of weight files", own_command("average", "--run-dir", run, *number, "--out", model))
    files = ["--src", data / "text" / "test.en", "--ref", data / "text" / "test.de", "--json", run / "bleu.json"]
    shared = ["--processes", ranks] if ranks > 1 else []
    call("Beam search on unseen sentences and BLEU", own_command("evaluate", "--model", model, *files, *shared))
    result = write_result(run)
    print_summary(run, result)


def call(title: str, command: list[object]) -> None:
    say(f"\n== {title}")
    run_printed(command)


def write_result(run: Path) -> dict[str, object]:
    scores = read_json(run / "bleu.json")
    end = read_records(run, "end")[-1]
    measured = ("train_seconds", "target_tokens_per_second", "training_flops", "world_size", "zero_stage")
    result = {name: scores[name] for name in ("bleu", "signature")} | {"synthetic": True}
    result |= {name: end[name] for name in measured}
    write_file(run / "result.json", json.dumps(result, indent=1) + "\n")
    return result


def print_summary(run: Path, result: dict[str, object]) -> None:
    data = run / "data" / "text"
    hypotheses = Path(str(read_json(run / "bleu.json")["hypotheses"])).read_text(encoding="utf-8").split("\n")
    sources = (data / "test.en").read_text(encoding="utf-8").split("\n")
    say("\n== Three unseen sentences")
    for source, hypothesis in list(zip(sources, hypotheses, strict=False))[:3]:
        say(f"  {source}\n    -> {hypothesis}")
    translate = as_typed(own_command("translate", "--model", run / "model"))
    curves = as_typed([installed_program("tensorboard"), "--host", "localhost", "--logdir", run / "tensorboard"])
    flags = ["--src", "F", "--tgt", "F", "--vocab-size", 10_000, "--out", "DATA"]
    say(
        f"\n== Done\n"
        f"BLEU {result['bleu']:.1f} on the synthetic corpus (it only shows that all parts work)\n"
        f"trained {result['train_seconds']:.0f} s at {result['target_tokens_per_second']:,.0f} target tokens/s on "
        f"{result['world_size']} ranks; all figures: {run / 'result.json'}\n\n"
        f"Next, in a new shell after: cd {shlex.quote(str(Path.cwd()))}\n"
        f"  translate:     echo 'The old man sees the small dog.' | {translate}\n"
        f"  report:        {as_typed(own_command('report', run))}\n"
        f"  curves:        {curves}\n"
        f"  your own text: {as_typed(own_command('prepare', *flags))}"
    )
