"""`dist-transformer doctor` on the null GPU: it must see the device, and that the device computes nothing."""

import json

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.preflight.job import check_job
from dist_transformer.preflight.settings import PreflightSettings
from dist_transformer.runtime.world import read_world


def main() -> None:
    world = read_world()
    checks = check_job(world, PreflightSettings())
    if world.is_main:
        print(json.dumps([{"name": check.name, "found": check.found, "state": check.state} for check in checks]))


if __name__ == "__main__":
    exit_on_user_error(main)
