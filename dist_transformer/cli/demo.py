"""Run the whole pipeline on the embedded synthetic corpus: prepare, train on 2 ranks with DeepSpeed, average, decode,
score with BLEU.

It prints each command before it runs it, so that you can repeat it with your own data. An interrupted demo resumes
where it stopped.
"""

import argparse
import json
import shlex
from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.base.files import write_file
from dist_transformer.cli.parser import make_parser, whole_number
from dist_transformer.config.plain import read_json
from dist_transformer.config.presets import PRESETS
from dist_transformer.data.text.toy_corpus import MOST_TOY_PAIRS
from dist_transformer.run.layout import read_records
from dist_transformer.run.outputs import claim_folder
from dist_transformer.runtime.launch import as_typed, installed_program, own_command, run_printed
from dist_transformer.runtime.processes import MOST_PROCESSES
from dist_transformer.runtime.world import require_no_launch


def main() -> None:
    arguments = parse_arguments()
    require_no_launch("the demo")
    run, ranks = arguments.run_dir, arguments.ranks
    claim_folder(run, "--run-dir", ())
    data, model = run / "data", run / "model"
    if not (data / "index.json").exists():
        flags = ["--toy", arguments.train_pairs, "--vocab-size", 1000, "--out", data]
        call("Corpus: synthetic sentences from a small grammar", own_command("prepare", *flags))
    settings = ["--preset", "tiny", "--data", data, "--run-dir", run, "--max-steps", str(arguments.max_steps)]
    call(f"Training: {ranks} ranks, ZeRO-1", own_command("train", *settings, "--processes", ranks))
    number = [] if arguments.average is None else ["--last", str(arguments.average)]
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
    result: dict[str, object] = {
        "bleu": scores["bleu"],
        "signature": scores["signature"],
        "synthetic": True,
        **{name: end[name] for name in measured},
    }
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


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="run folder (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=whole_number(1, MOST_PROCESSES),
        default=2,
        dest="ranks",
        help="processes (default: %(default)s)",
    )
    parser.add_argument(
        "--train-pairs",
        type=whole_number(1, MOST_TOY_PAIRS),
        default=25_000,
        help="synthetic pairs (default: %(default)s)",
    )
    steps = PRESETS["tiny"].max_steps
    parser.add_argument(
        "--max-steps", type=whole_number(1, 2**30), default=steps, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--average", type=whole_number(1, 1000), help="newest weight files averaged (default: average chooses)"
    )
    return parser.parse_args()
