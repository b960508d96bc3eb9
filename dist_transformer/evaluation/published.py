"""Published test sets by the names that sacreBLEU gives them, such as `wmt14/full`."""

import importlib.metadata
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.language_codes import base_language
from dist_transformer.config.wrong_names import meant
from dist_transformer.model_folder import ModelInfo


def published_files(name: str, info: ModelInfo) -> list[Path]:
    """Return the file of the sources and those of the references, from sacreBLEU's cache or its download.

    Args:
        info: description of a model, of one direction.

    Raises:
        UserError: there is no such test set, or not in this direction, or it cannot be downloaded.
    """
    from sacrebleu.dataset import DATASETS

    if name not in DATASETS:
        near = meant(name, DATASETS)
        remedy = near if near.startswith("did") else "sacrebleu --list lists them"
        raise UserError(f"test_set {name} is none of sacreBLEU's: {remedy}")
    test_set = DATASETS[name]
    pair = "-".join(map(base_language, (info.source_language, info.target_language)))
    if pair not in test_set.langpairs:
        raise UserError(
            f"test_set {name} has no direction {pair}: choose another test set, or another --direction "
            f"({', '.join(test_set.langpairs)})"
        )
    try:
        return [Path(test_set.get_source_file(pair)), *map(Path, test_set.get_reference_files(pair))]
    except (Exception, SystemExit) as error:  # one of many types: no network, another content, a full disk
        raise UserError(
            f"test_set {name} is not in sacreBLEU's cache, and cannot be downloaded ({error}): run sacrebleu "
            f"-t {name} -l {pair} --echo src where there is a network, and name the copy of ~/.sacrebleu by SACREBLEU"
        ) from error


def published_origin(name: str, info: ModelInfo) -> dict[str, str]:
    """Describe a test set for the JSON of its scores."""
    return {"name": name, "direction": info.direction.name, "sacrebleu": importlib.metadata.version("sacrebleu")}
