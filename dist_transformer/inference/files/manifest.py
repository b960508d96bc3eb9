"""The manifest of a translation: everything that determines its output, and the comparison with an earlier start."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.config.plain import parse_json
from dist_transformer.inference.files.parts import Source
from dist_transformer.model_folder import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from dist_transformer.version import __version__

MANIFEST_FILE = "manifest.json"


def manifest_of(models: Sequence[Path], source: Source, settings: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest: version, SHA-256 of the models' files and of the text, and settings."""
    values = {
        "version": __version__,
        "models": [
            {name: sha256_of(model / name) for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE)} for model in models
        ],
        "inputs": {"lines": source.lines, "sha256": source.sha256},
        "settings": settings,
    }
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def require_same(parts: Path, manifest: bytes) -> None:
    """Compare the manifest in a folder of parts, if there is one, with that of the command.

    Raises:
        UserError: they differ, and the message names each difference; or the one in the folder is damaged.
    """
    file = parts / MANIFEST_FILE
    if not file.exists():
        return
    try:
        other = _differences(parse_json(file.read_bytes()), parse_json(manifest))
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{file} is damaged, or of another version: remove {parts} to start again") from None
    if other:
        raise UserError(
            f"{parts} was started {' and '.join(other)}: use the same settings and files to resume it, or remove that "
            "folder to start again"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    other = []
    if before["version"] != now["version"]:
        other.append(f"by version {before['version']}, not {now['version']}")
    if before["models"] != now["models"]:
        other.append("with another model")
    if before["inputs"] != now["inputs"]:
        other.append("with other inputs, or with these before they changed")
    for flag in {**before["settings"], **now["settings"]}:
        was, is_now = before["settings"].get(flag), now["settings"].get(flag)
        if was != is_now:
            other.append(_difference(flag, was, is_now))
    return other


def _difference(flag: str, was: Any, is_now: Any) -> str:
    if was is None or was is False:
        return f"without {flag}"
    value = "" if was is True else f" {was}"
    return f"with {flag}{value}" + ("" if is_now is None or is_now is False else f", not {is_now}")
