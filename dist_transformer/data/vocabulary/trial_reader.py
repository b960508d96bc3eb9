"""Program that `try_in_child` starts: it reads the content of a vocabulary from stdin, and uses it once."""

import contextlib
import resource
import sys

from dist_transformer.data.vocabulary.kinds import parse

_TEXT = "a Wörld \u00ad 的 e\u0301 ½ ﬁ </s> \U0001f600"
_MEMORY_BYTES, _CPU_SECONDS = 2**31, 120


def main() -> None:
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
