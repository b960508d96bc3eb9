"""Fingerprints of what the program computes: two versions that print the same lines behave alike.

    python -m tests.fingerprints [--clone FOLDER] [--json FILE]

It prepares the embedded corpus, trains 40 steps of `tiny` at ZeRO stages 0 to 3, in both precisions, on one rank and
on two, averages, and translates 200 lines, four translations per line. It uses the commands only, so that it can also
run those of another clone (`--clone`), such as a worktree of an older commit. Each line has the SHA-256 of what one
command made: the bytes of shards and tokenizer, the tensors of the last checkpoint with the ledger and the logged
losses, the averaged weights, the translations. Equal lines are to be expected on one machine only, with one thread per
rank. About five minutes on two cores.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STEPS = 40
LINES = 200
# What a line of metrics.jsonl has of the numbers, not of the time that they took.
LOGGED = ("kind", "step", "loss", "nll", "learning_rate", "gradient_norm", "bleu", "skipped_steps")


class Clone:
    """Runs the commands of one clone.

    Args:
        root: the clone.
        scratch: folder for everything that they make.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root, scratch
        changed = {"PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **changed}

    def run(self, *words: object, stdin: str | None = None) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.root,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout

    def tool(self, name: str, *words: object, stdin: str | None = None) -> str:
        return self.run(sys.executable, f"tools/{name}.py", *words, stdin=stdin)

    def prepare(self) -> Iterator[tuple[str, str]]:
        data = self.scratch / "data"
        self.tool("prepare_data", "--toy", "2000", "--vocab-size", "400", "--pairs-per-shard", "500", "--out", data)
        for path in sorted(path for path in data.rglob("*") if path.is_file()):
            yield f"data {path.relative_to(data)}", sha256([path.read_bytes()])

    def train(self, *, stage: int, precision: str, ranks: int) -> tuple[str, str]:
        name = f"zero{stage}-{precision}-{ranks}"
        run = self.scratch / name
        launcher = [sys.executable, "-m", "dist_transformer.train"]
        if ranks > 1:
            beside = Path(sys.executable).parent / "deepspeed"
            launcher = [str(beside), "--num_gpus", str(ranks), "--master_port", str(free_port()), "--module"]
            launcher += ["dist_transformer.train"]
        self.run(
            *launcher,
            *("--preset", "tiny", "--data", self.scratch / "data", "--run-dir", run, "--precision", precision),
            *("--deepspeed_config", self.root / "ds_configs" / f"zero{stage}.json"),
            *("--max-steps", STEPS, "--save-every", STEPS // 2, "--validate-every", STEPS, "--log-every", 5),
        )
        return f"run {name}", sha256(self._pieces(run))

    def _pieces(self, run: Path) -> Iterator[bytes]:
        for path in sorted((run / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")):
            yield from tensors(path)
        yield from tensors(run / "weights" / f"step-{STEPS:08d}.safetensors")
        yield (run / "ledger.jsonl").read_bytes()
        for line in (run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            yield json.dumps([record.get(field) for field in LOGGED]).encode()

    def average(self) -> tuple[str, str]:
        model = self.scratch / "model"
        self.tool("average_checkpoints", "--run-dir", self.scratch / "zero1-fp32-1", "--last", 2, "--out", model)
        return "average", sha256(tensors(model / "model.safetensors"))

    def translate(self) -> tuple[str, str]:
        # The run keeps no text, and short training gives the same few words: the trained model on what it was given.
        source = (self.scratch / "data" / "valid" / "source.txt").read_text(encoding="utf-8").splitlines()[:LINES]
        lines = self.tool("translate", "--model", self.scratch / "model", "--nbest", 4, stdin="\n".join(source) + "\n")
        return f"translate {len(source)} lines", sha256([lines.encode()])

    def fingerprints(self) -> Iterator[tuple[str, str]]:
        yield from self.prepare()
        for ranks, precision, stage in product((1, 2), ("fp32", "bf16"), range(4)):
            yield self.train(stage=stage, precision=precision, ranks=ranks)
        yield self.average()
        yield self.translate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def tensors(path: Path) -> Iterator[bytes]:
    """Names, types, shapes and bytes of a safetensors file, without the metadata that name versions."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
        yield content[8 + size + begin : 8 + size + end]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fingerprints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clone", type=Path, default=ROOT, help="clone whose commands are run (default: this one)")
    parser.add_argument("--json", type=Path, help="also write the fingerprints to this file")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="dist_transformer-fingerprints-") as scratch:
        for name, value in Clone(arguments.clone.resolve(), Path(scratch)).fingerprints():
            found[name] = value
            print(f"{value}  {name}", flush=True)
    print(f"{sha256(f'{name} {value}'.encode() for name, value in found.items())}  all", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
