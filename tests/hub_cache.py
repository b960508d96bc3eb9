"""Folders laid out as the hub's library keeps what it has downloaded."""

import os
import shutil
from pathlib import Path

from dist_transformer.base.files import sha256_of


def as_hub_cache(folder: Path, cache: Path) -> Path:
    """Copy a folder to `cache`, and give the folder there: its files are links to blobs."""
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    blobs.mkdir(parents=True)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / sha256_of(file)
        shutil.copyfile(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot
