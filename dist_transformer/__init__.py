"""Train the Transformer of "Attention Is All You Need" for translation, on one CPU or many GPUs.

`dist_transformer.load(path).translate(lines)` translates with a trained model; `dist_transformer.api` has the rest.
"""

from dist_transformer.version import __version__ as __version__

# As in `typing`, which `python -m` would import from a folder that may be a stranger's.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dist_transformer.base.errors import UserError as UserError
    from dist_transformer.inference.trained_model import TrainedModel

    load = TrainedModel.load


def __getattr__(name: str) -> object:
    """Import on first use, so that `dist-transformer --help` does not import torch."""
    if name == "load":
        from dist_transformer.inference.trained_model import TrainedModel

        return TrainedModel.load
    if name == "UserError":
        from dist_transformer.base.errors import UserError

        return UserError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
