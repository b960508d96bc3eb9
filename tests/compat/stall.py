"""The wait for data of a training at a GPU's speed, behind an S3 server that answers late.

python -m tests.compat.stall --data data/mine --json results/scale/object-store.json

Runs `tools/benchmark.py stall` with windows of one shard, none of which stays in memory, and an empty cache that holds
70% of the shards, so that each epoch fetches some again. The server is on this machine: its disk and network are not
those of a real store, but its delay is.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dist_transformer.data.folder.reader import DataFolder
from tests.compat.environments import extend_environment, make_environment, pinned
from tests.compat.object_store import running_store
from tests.conftest import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data folder, which is copied to the server")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds before each answer (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=600_000, help="target tokens per second (default: %(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="result file")
    arguments = parser.parse_args()
    room = 0.7 * sum(shard.bytes for shard in DataFolder.open(arguments.data).index.train.shards) / 2**30
    with tempfile.TemporaryDirectory() as scratch:
        server = make_environment(Path(scratch) / "server", "moto[server]", constrained=False)
        programs = extend_environment(Path(sys.executable).parent, Path(scratch) / "s3fs", "s3fs", pinned("fsspec"))
        with running_store(server / "moto_server") as store:
            url = store.upload(arguments.data, "data")
            store.suffer("none", delay_seconds=arguments.delay)
            words = ["stall", "--data", url, "--preset", "base", f"--rate={arguments.rate:g}", "--json", arguments.json]
            flags = ["--cache-gib", f"{room:.6f}", "--memory-gib", "0", "--batch.window-shards", "1"]
            subprocess.run(
                [programs / "python", ROOT / "tools" / "benchmark.py", *words, "--", *flags],
                check=True,
                # The cache is in the home folder.
                env={**os.environ, **store.environment, "PYTHONPATH": str(ROOT), "HOME": scratch},
            )


if __name__ == "__main__":
    main()
