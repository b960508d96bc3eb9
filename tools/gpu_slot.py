"""`benchmarks/gpu_slot.py` as a script."""

if __name__ == "__main__":
    import _start  # noqa: F401

from benchmarks.gpu_slot import main
from dist_transformer.base.errors import exit_on_user_error

if __name__ == "__main__":
    exit_on_user_error(main)
