"""Damages files of every format that comes from elsewhere, again and again, and lets the real readers read them.

    python -m tests.fuzz [--cases 1000] [--seed 1] [--only NAME …] [--json FILE] [--keep FOLDER]

Each case must be read, or be refused by one line, within 5 s of processor time and 1 GiB.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.tokenizer import train_tokenizer
from dist_transformer.errors import UserError, exit_on_user_error
from dist_transformer.files import sha256_of, write_file
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from tests.fuzz.formats import FORMATS, Lab
from tests.fuzz.harness import READ, REFUSED
from tests.fuzz.hunt import SEED, hunt


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    kinds = [kind for kind in FORMATS if kind.name in (arguments.only or [kind.name])]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dist_transformer-fuzz-") as scratch:
        lab = Lab(Path(scratch), make_model(Path(scratch) / "sound model"))
        for kind in kinds:
            began = time.monotonic()
            result = hunt(kind, lab, cases=arguments.cases, seed=arguments.seed)
            results[kind.name] = {
                "cases": result.cases,
                READ: result.counts[READ],
                REFUSED: result.counts[REFUSED],
                "failed": result.failed,
                "problems": list(result.found),
                "seconds": round(time.monotonic() - began, 1),
            }
            print(f"{kind.name}: {json.dumps(results[kind.name], ensure_ascii=False)}", flush=True)
            for number, content in enumerate(result.found.values()):
                if arguments.keep is not None:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    (arguments.keep / f"{kind.name} {number}").write_bytes(content)
    if arguments.json is not None:
        write_file(arguments.json, json.dumps({"seed": arguments.seed, "formats": results}, indent=1) + "\n")
    if failed := sum(result["failed"] for result in results.values()):
        raise UserError(f"{failed} cases failed: see above")


def make_model(path: Path) -> Path:
    """A model folder of a few kilobytes."""
    tokenizer = train_tokenizer(["a sentence"], vocab_size=262)
    file = path.with_name("tokenizer.json")
    tokenizer.save(file)
    model = Transformer(
        ModelConfig(
            width=8,
            heads=2,
            ffn_width=8,
            encoder_layers=1,
            decoder_layers=1,
            max_positions=16,
            vocab_size=tokenizer.vocab_size,
        )
    )
    info = ModelInfo(
        model=model.config,
        tokenizer_sha256=sha256_of(file),
        source_language="en",
        target_language="de",
        corpus="fuzz",
        synthetic=True,
        steps=(1,),
    )
    write_model_folder(path, info=info, weights=dict(model.state_dict()), tokenizer_json=file.read_bytes())
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [kind.name for kind in FORMATS]
    parser.add_argument("--cases", type=int, default=1_000, help="of each format (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {'; '.join(names)}")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--keep", type=Path, help="folder for content that failed")
    return parser.parse_args()


if __name__ == "__main__":
    exit_on_user_error(main)
