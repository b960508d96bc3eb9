"""Train the Transformer of "Attention Is All You Need" for translation, on one CPU or many GPUs.

`dist_transformer.load(path).translate(lines)` translates with a trained model; `dist_transformer.api` has the rest.
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m dist_transformer`, in a folder that may be a stranger's: import no modules that lie there.
    del sys.path[0]

from typing import TYPE_CHECKING, Any

from dist_transformer.version import __version__ as __version__

if TYPE_CHECKING:
    from dist_transformer.base.errors import UserError as UserError
    from dist_transformer.inference.trained_model import TrainedModel

    load = TrainedModel.load


def __getattr__(name: str) -> Any:
    """Import on first use, so that `dist-transformer --help` does not import torch."""
    if name == "load":
        from dist_transformer.inference.trained_model import TrainedModel

        return TrainedModel.load
    if name == "UserError":
        from dist_transformer.base.errors import UserError

        return UserError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
