"""Run by ranks of DeepSpeed: twenty steps with Muon at every stage, at once and in two parts.

Usage: worker_muon.py DATA OUT PRECISION… Rank 0 writes OUT/results.json; the tests read it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import OptimizerConfig
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.assembly import assemble
from tests.distributed.worker_stages import ds_config_path, handed_over, make_config, resume_result

MUON = OptimizerConfig(kind="muon", schedule="inverse_sqrt", peak_lr=3e-3, warmup_steps=4, weight_decay=0.01)


def main() -> None:
    data, out, *precisions = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    world = read_world()
    results: dict[str, Any] = {}
    Reporter.pictures = lambda *_: None  # type: ignore[method-assign]
    with process_group(world, single=True) as device:
        for precision in precisions:
            for stage in range(4):
                name = f"zero{stage}-{precision}"
                config = make_config(data, out / name, f"zero{stage}", precision)
                config = config.changed(optimizer=MUON, max_steps=20, save_every=10, validate_every=0)
                results[name] = resume_result(config, world, device)
            name = f"handed-over-{precision}"
            config = make_config(data, out, "zero0", precision).changed(optimizer=MUON, validate_every=0)
            results[name] = handed_over(config, out / name, world, device)
        config = config.changed(max_steps=7)
        for changes in (
            {"run_dir": out / name, "optimizer": OptimizerConfig(schedule="inverse_sqrt")},
            {"run_dir": out / "offloaded", "deepspeed_config": ds_config_path("zero3_offload")},
        ):
            try:
                assemble(config.changed(**changes), world, device)
            except UserError as error:
                results.setdefault("refused", []).append(str(error))
    results["offloaded_is_there"] = (out / "offloaded").exists()
    if world.is_main:
        (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
