"""Settings of the C library's allocator for training on a CPU.

glibc returns each large block to the kernel when it is freed, and the kernel zeroes the next one, page by page, at its
first use. Every training step frees and allocates the same blocks: in a step of 2,048 tokens of `base` under DeepSpeed
this took an eighth of the time.
"""

import ctypes

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees, so that it keeps its peak. No effect without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # All blocks come from the one heap, which never shrinks; heaps of other threads hold at most 64 MB.
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
            mallopt(option, value)
