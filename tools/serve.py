"""`dist_transformer/cli/serve.py` as a script."""

if __name__ == "__main__":
    import _start  # noqa: F401

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.cli.serve import main

if __name__ == "__main__":
    exit_on_user_error(main)
