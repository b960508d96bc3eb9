"""`make gpu-slot` on the null GPU: what the host reads of the device is replaced in all of its processes."""

import dataclasses

from benchmarks import gpu_slot
from dist_transformer.base.errors import exit_on_user_error
from tests.nullgpu.train import stand_in

if __name__ == "__main__":
    stand_in()
    # Tests look at values, which are not real here.
    del gpu_slot.CHECKS["tests"]
    # The limits are those of a machine with a GPU.
    for name, check in gpu_slot.CHECKS.items():
        gpu_slot.CHECKS[name] = dataclasses.replace(check, seconds=10 * check.seconds)
    exit_on_user_error(gpu_slot.main)
