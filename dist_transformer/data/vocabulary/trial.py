"""Trial of a vocabulary from elsewhere in a child process, because some damaged files crash the libraries."""

import subprocess
import sys

from dist_transformer.runtime.launch import environment_of_child

_READER = "dist_transformer.data.vocabulary.trial_reader"


def try_in_child(content: bytes) -> None:
    """Open a vocabulary in a child process with limits of memory and time.

    Raises:
        ValueError: the child crashed or met a limit; the message continues a sentence that begins with the file's name.
    """
    # Threads take memory on machines with many cores.
    environment = {**environment_of_child(), "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", _READER]
    done = subprocess.run(command, input=content, env=environment, stderr=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ValueError("crashed the library that reads it, or took too much memory or time, so it may be damaged")
