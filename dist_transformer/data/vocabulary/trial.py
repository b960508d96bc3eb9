"""Trial of a vocabulary from elsewhere in a child process, because some damaged files crash the libraries."""

import contextlib
import resource
import subprocess
import sys

from dist_transformer.runtime.launch import environment_of_child

_TEXT = "a Wörld \u00ad 的 e\u0301 ½ ﬁ </s> \U0001f600"
_MEMORY_BYTES, _CPU_SECONDS = 2**31, 120


def try_in_child(content: bytes) -> None:
    """Open a vocabulary in a child process with limits of memory and time, and use it once.

    Raises:
        ValueError: the child crashed or met a limit; the message continues a sentence that begins with the file's name.
    """
    # Threads take memory on machines with many cores.
    environment = {**environment_of_child(), "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dist_transformer.data.vocabulary.trial"]
    done = subprocess.run(command, input=content, env=environment, stderr=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ValueError("crashed the library that reads it, or took too much memory or time, so it may be damaged")


def main() -> None:
    """Do the trial of the content on standard input, in the child process."""
    from dist_transformer.data.vocabulary.kinds import parse

    # A crash is reported by the parent, and leaves no file in the current folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    content = sys.stdin.buffer.read()
    # The parent meets the same refusal, and reports it.
    with contextlib.suppress(ValueError):
        vocabulary = parse(content)
        for side in (vocabulary.source, vocabulary.target):
            side.decode(side.encode(_TEXT))


if __name__ == "__main__":
    main()
