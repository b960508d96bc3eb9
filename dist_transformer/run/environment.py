"""Record versions and hardware of each start of a run in the run folder, for its report.

RUN/environment.json is a list with one entry per start of the run: {"step": steps done before, "time": UTC, versions,
hardware, ranks, settings}. It contains no user, host or path, so that a run folder can be shared.
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dist_transformer.base.files import write_file
from dist_transformer.base.native import cpu_info
from dist_transformer.run.layout import ENVIRONMENT_FILE
from dist_transformer.runtime.versions import versions


def describe_environment(*, world_size: int = 1, local_size: int = 1) -> dict[str, Any]:
    """Describe this machine as JSON values.

    Args:
        world_size: ranks of the run; `local_size` of them are on this host. All hosts are assumed to be alike.
    """
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **versions(),
        "cuda": torch.version.cuda if gpus else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "hosts": -(-world_size // local_size),
        "world_size": world_size,
    }


def _processor(cpuinfo: Path) -> str:
    """Return the name of the CPU, or its architecture if the system does not give a name."""
    lines = cpu_info(cpuinfo).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def record_environment(run_dir: Path, described: dict[str, Any], *, step: int) -> None:
    """Add a start of the run at `step` to its environment.json. One rank calls it."""
    entry = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **described}
    content = json.dumps([*read_environments(run_dir), entry], indent=1) + "\n"
    write_file(run_dir / ENVIRONMENT_FILE, content)


def read_environments(run_dir: Path) -> list[dict[str, Any]]:
    """Read the starts of a run, oldest first."""
    try:
        entries: list[dict[str, Any]] = json.loads((run_dir / ENVIRONMENT_FILE).read_bytes())
    except (OSError, ValueError):
        # The file only explains a run, so a missing or damaged one must not stop it.
        return []
    return entries
