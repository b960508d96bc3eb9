"""Program that reads a dataset for `HubDataset.pairs`, which starts it as a process of its own.

The dataset comes as a line of JSON on stdin. The pairs go to stdout as lines of JSON: {"pairs": [[source, target] or
null, …]}, at the end {"end": true} or {"error": message, "transient": whether the same command may succeed}.
"""

import itertools
import json
import os
import resource
import sys
import threading

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.data.text.hub import HubDataset

_PAIRS = 1_000


def main() -> None:
    # What a library prints must not be between the lines.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A crash is reported by the parent, and leaves no file in the current folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dataset = HubDataset(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pairs = dataset.read()
    answer: dict[str, object] = {"end": True}
    try:
        while batch := list(itertools.islice(pairs, _PAIRS)):
            print(json.dumps({"pairs": batch}), file=answers, flush=True)
    except UserError as error:
        answer = {"error": str(error), "transient": isinstance(error, TransientError)}
    print(json.dumps(answer), file=answers, flush=True)


def _end_with_parent() -> None:
    """End this process when its stdin closes; otherwise it would read a long dataset for nobody."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
