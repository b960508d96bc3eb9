"""Import a user's code that registers names: a module or a file, before a command runs."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of

IMPORTED: dict[str, str] = {}
"""Extensions of this process and the SHA-256 of their file."""


def import_extension(name: str) -> None:
    """Import a module by its name (the current folder is searched first) or a file that ends with `.py`.

    A file that is imported twice runs once.

    Raises:
        UserError: there is no such module or file. Errors inside it are not caught, because it is the user's code.
    """
    if not name.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            module = importlib.import_module(name)
            _note(name, module)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0] and error.name != name:
                raise
            raise UserError(f"--import {name} names no module here: pass the name of a module, or FILE.py") from None
        return
    file = Path(name).resolve()
    # The key is the whole path, so that a file with the name of a library does not replace the library.
    module_name = str(file)
    if module_name in sys.modules:
        return
    specification = importlib.util.spec_from_file_location(module_name, file)
    if not file.is_file() or specification is None or specification.loader is None:
        raise UserError(f"--import {name} does not exist: check the path")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    _note(file.name, module)
    specification.loader.exec_module(module)


def _note(name: str, module: ModuleType) -> None:
    file = getattr(module, "__file__", None)
    IMPORTED[name] = sha256_of(Path(file)) if file else "no file"
