"""Give the site the layout of the repository, so that the links of its pages lead to the same files on both.

A page of docs/ may link to ../results/run.json or ../ds_configs/README.md, which mkdocs does not see, because they lie
outside docs/. This hook gives every page its path in the repository, and adds the files outside docs/ that pages show.
"""

import fnmatch
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Patterns of paths in the repository.
SHOWN = (
    "*.md",
    "CITATION.cff",
    "LICENSE",
    "docs/*.md",
    "docs/decisions/*.md",
    "docs/images/*",
    "docs/images/pictures/*",
    "docs/site/*.css",
    "dist_transformer/api.py",
    "ds_configs/*",
    "results/*/*",
    "tests/durations.csv",
    "tests/faults/test_planted.py",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of SHOWN, under their paths in the repository."""
    root = Path(config.config_file_path).parent
    for file in files.documentation_pages() + files.media_files():
        if file.abs_src_path is not None and Path(file.abs_src_path).is_relative_to(config.docs_dir):
            files.remove(file)
    for pattern in SHOWN:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not fnmatch.fnmatch(path.name, ".*"):
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
