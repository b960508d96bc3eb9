"""The host's side of the GPU path, run on a stub of CUDA: `make null-gpu`.

torch's build for CUDA, DeepSpeed, Inductor, Triton and stream capture really run; kernels are counted and compute
nothing, except for our own, whose numbers Triton's interpreter computes. It counts launches and waits of a step,
compares peak memory with the plan, records beam search as a graph, and trains, saves and resumes under ZeRO 0 to 3 on
one GPU and on two. Counts go to results/speed/null-gpu.json, with the lines that name CUDA and did not run; figures of
an older version, under `before` in that file, stay. It exits with status 1 when a bound is exceeded.

The environment (5 GB) is made in .nullgpu/ at first use.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import result_of, write_result
from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.config.plain import read_json
from dist_transformer.config.presets import PRESETS
from dist_transformer.cost.memory import ZeroSettings, predict_memory
from tests.nullgpu.home import ROOT, Home

_HERE = Path(__file__).parent
_RESULT = ROOT / "results/speed/null-gpu.json"
# Of a step of `big` on 25k tokens at once, compiled: kernels started, and waits for the device.
_MOST_LAUNCHES, _MOST_WAITS = 1_000, 0
# Of a step with a graph: the update.
_MOST_BESIDE_A_GRAPH = 100
# Of Muon's update, for each shape of matrix, beside those of Adam.
_MOST_OF_A_SHAPE, _SHAPES = 30, 3
# How far the measured peak may be from the planned one.
_PEAK_TOLERANCE = 0.1
_MOST_BYTES_A_LOGIT = 4.1
# Of our kernels in fp16, whose rounding is 5e-4.
_KERNEL_ERROR = 1e-3
_STEPS: dict[str, dict[str, Any]] = {
    "at once, compiled": {"packs_per_micro_batch": 64, "compile": True, "stage": 1, "more_packs": 20},
    "at once": {"packs_per_micro_batch": 64, "compile": False, "stage": 1},
    "in eight, compiled": {"packs_per_micro_batch": 8, "compile": True, "stage": 1},
    "at once, compiled, stage 0": {"packs_per_micro_batch": 64, "compile": True, "stage": 0},
}
# 3.5k target tokens, as on each GPU of 16 nodes.
_SMALL = {"preset": "big", "packs": 9, "packs_per_micro_batch": 9, "compile": False}
_STAGES: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"stage": stage} for stage in range(4)},
    **{f"ZeRO-{stage}, graph": {"stage": stage, "graph": True} for stage in range(2)},
}


class Checks:
    """Runs programs on the null GPU, and collects what they say and where they exceed a bound."""

    def __init__(self, home: Home, scratch: Path) -> None:
        self.home, self.scratch = home, scratch
        self.figures: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.problems: list[str] = []

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)
            say(f"EXCEEDED: {problem}")

    def run(
        self,
        name: str,
        *words: object,
        devices: int = 1,
        covered: bool = True,
        status: int = 0,
        seconds: float = 900,
    ) -> str:
        """Run a Python program; return its standard output.

        Args:
            words: a script and its arguments, or -m and a module.
            covered: note which lines it runs.
        """
        started = time.monotonic()
        settings = ["--parallel-mode", f"--data-file={self.scratch}/.coverage", "--source=dist_transformer"]
        program = ["-m", "coverage", "run", *settings, *words] if covered else [*words]
        command = [self.home.python, *program]
        if devices > 1:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={devices}", "--no-python"]
            command = [self.home.python, *launcher, *command]
        done = subprocess.run(
            list(map(str, command)),
            env=self.home.environment(devices=devices),
            cwd=self.scratch,
            check=False,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        self.seconds[name] = round(time.monotonic() - started, 1)
        say(f"{name}: {self.seconds[name]:.0f} s")
        self.require("no CUDA graphs are used" not in done.stdout + done.stderr, f"{name}: no graphs")
        if done.returncode != status:
            raise UserError(f"{name} exits {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=ROOT / ".nullgpu", help="of the environment (default: .nullgpu)")
    arguments = parser.parse_args()
    home = Home(arguments.home.absolute())
    home.prepare()
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(home, Path(scratch))
        for check in _CHECKS:
            check(checks)
        checks.figures["lines_not_run"] = list(lines_not_run(checks))
    checks.figures["before"] = read_json(_RESULT)["figures"]["before"]
    result = result_of(
        None,
        what="`make null-gpu`: the host's side of the GPU path on a stub of CUDA; counts, no timings",
        command="make null-gpu",
        seeds=[0],
        wall_seconds=round(sum(checks.seconds.values()), 1),
        figures={**checks.figures, "seconds": checks.seconds},
        rows=_rows(checks.figures),
    )
    write_result(_RESULT, result)
    if checks.problems:
        raise UserError(f"on the null GPU: {'; '.join(checks.problems)}")


def _rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a table of the steps: each count, and the same of the older version if it has one."""
    rows = []
    for name in figures["stages"]:
        cells = [name]
        for count, digits in (("launches", 0), ("waits", 0), ("collectives", 0), ("host_milliseconds", 1)):
            end = f"[stages][{name}][{count}]:,.{digits}f}}"
            cells += ["{figures" + end, "{figures[before]" + end if name in figures["before"]["stages"] else "–"]
        rows.append({"table": "null_gpu", "cells": cells})
    return rows


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_kernels(checks: Checks) -> None:
    found = checks.figures["kernel_errors"] = json.loads(checks.run("kernels, interpreted", _HERE / "interpret.py"))
    for name, error in found.items():
        checks.require(error <= _KERNEL_ERROR, f"{name}: off by {error:.1e}")


def check_steps(checks: Checks) -> None:
    found = checks.figures["steps"] = {}
    for name, way in _STEPS.items():
        request = json.dumps({"preset": "big", "packs": 64, **way})
        # Lines that a compiler follows are slow to note, and are the same.
        output = checks.run(f"step {name}", _HERE / "step.py", request, covered=not way["compile"])
        step = found[name] = json.loads(output.splitlines()[-1])
        checks.require(step["breaks"] == 0, f"step {name}: {step['breaks']} graph breaks")
        checks.require(step["graphs_later"] == 0, f"step {name}: {step['graphs_later']} graphs compiled again")
        step["planned_bytes"] = _planned(step)
        apart = step["peak_bytes"] / step["planned_bytes"] - 1
        checks.require(abs(apart) <= _PEAK_TOLERANCE, f"step {name}: {apart:+.0%} of the planned memory")
        waits = sum(step["waits"].values())
        checks.require(waits <= _MOST_WAITS, f"step {name}: {waits} waits for the device")
    launches = found["at once, compiled"]["launches"]
    checks.require(launches <= _MOST_LAUNCHES, f"{launches:,} launches in a step of 25k tokens")


def check_stages(checks: Checks) -> None:
    """Count a step of few tokens at each ZeRO stage, on one GPU and on two."""
    found = checks.figures["stages"] = {}
    for devices, gpus in ((1, "one GPU"), (2, "two GPUs")):
        for name, way in _STAGES.items():
            step = found[f"{name}, {gpus}"] = _count(checks, f"{name}, {gpus}", way, devices=devices)
            # With others, DeepSpeed waits at stage 2, and always at stage 3.
            if devices + way["stage"] < 4:
                checks.require(not step["waits"], f"{name}, {gpus}: {step['waits']} waits for the device")
            if "graph" in way:
                fits = step["starts_of_a_graph"] == 1 and step["launches"] <= _MOST_BESIDE_A_GRAPH
                checks.require(fits, f"{name}, {gpus}: {step['launches']} launches beside the graph")
    muon = found["ZeRO-0, Muon, one GPU"] = _count(checks, "ZeRO-0, Muon, one GPU", {"stage": 0, "optimizer": "muon"})
    more = (muon["launches"] - found["ZeRO-0, one GPU"]["launches"]) / _SHAPES
    checks.require(more <= _MOST_OF_A_SHAPE, f"Muon: {more:.0f} launches for each shape of matrix")


def _count(checks: Checks, name: str, way: dict[str, Any], *, devices: int = 1) -> dict[str, Any]:
    output = checks.run(f"step, {name}", _HERE / "step.py", json.dumps(_SMALL | way), devices=devices, covered=False)
    step = json.loads(output.splitlines()[-1])
    calls = step["other_calls"]
    return {
        "launches": step["launches"],
        "starts_of_a_graph": calls.get("cudaGraphLaunch", 0),
        "waits": sum(step["waits"].values()),
        "collectives": sum(count for call, count in calls.items() if call.startswith("nccl:")),
        "host_milliseconds": step["host_milliseconds"],
    }


def _planned(step: dict[str, Any]) -> int:
    big = PRESETS["big"].changed(compile="on" if step["compile"] else "off")
    config = dataclasses.replace(
        big,
        model=dataclasses.replace(big.model, vocab_size=37_000),
        batch=dataclasses.replace(big.batch, packs_per_micro_batch=step["packs_per_micro_batch"]),
    )
    zero = ZeroSettings(stage=step["stage"])
    return predict_memory(config, zero, world_size=1, source_budget=big.batch.max_target_tokens).peak


def check_softmax(checks: Checks) -> None:
    output = checks.run("softmax", _HERE / "softmax.py", covered=False)
    found = checks.figures["softmax"] = json.loads(output.splitlines()[-1])
    moved = found["bytes_a_logit"]
    checks.require(moved <= _MOST_BYTES_A_LOGIT, f"the softmax moves {moved:.1f} bytes a logit")


def check_decoding(checks: Checks) -> None:
    found = checks.figures["decoding"] = json.loads(checks.run("decoding", _HERE / "decode.py").splitlines()[-1])
    for search in found:
        name = f"search in {search['slots']} slots"
        checks.require(not search["refused"], f"{name}: CUDA refuses {search['refused']} in a graph")
        checks.require(search["nodes"] > 0, f"{name}: the graph is empty")
        checks.require(search["waits_of_a_step"] == 0, f"{name}: a step waits for the device")
        checks.require(search["cudnn_kernels"] == 0, f"{name}: attention by cuDNN")


def check_runs(checks: Checks) -> None:
    """Whole trainings, with validation, checkpoints and a second start."""
    data = checks.scratch / "data"
    prepare = ["prepare", "--toy", 200, "--vocab-size", 400, "--out", data]
    checks.run("prepare", "-m", "dist_transformer", *prepare)
    common = ["--preset", "tiny", "--data", data, "--log-every", 1, "--save-every", 2, "--validate-every", 2]
    for devices in (1, 2):
        for stage in range(4):
            name = f"training, ZeRO-{stage}, {devices} GPU(s)"
            run_dir = checks.scratch / f"run-{stage}-{devices}"
            flags = [*common, "--run-dir", run_dir, "--deepspeed-config", f"zero{stage}"]
            # One of these stages on each number of GPUs.
            flags += ["--cuda-graphs", "yes"] if devices == stage + 1 else []
            stops = (stage, devices) == (1, 1)
            _train(checks, name, *flags, "--max-steps", 4, *(_STOPPING if stops else ()), devices=devices, stops=stops)
            if stops or (stage, devices) == (0, 2):
                again = ["--max-steps", 6, "--resume", "required"]
                _train(checks, f"{name}, resumed", *flags, *again, devices=devices)
    # Values are not real, so that its checks of learning fail: only that it comes to its table is looked at.
    tried = checks.run("--test-mode", _HERE / "train.py", *common[:4], "--test-mode", status=1)
    checks.require("resumes exactly" in tried, "--test-mode has no table of checks")


# The program that asks the training to stop in its first validation.
_STOPPING = ("--validation-command", "sh -c 'kill -TERM $PPID; sleep 60' {hypothesis}")


def _train(checks: Checks, name: str, *flags: object, devices: int, stops: bool = False) -> None:
    output = checks.run(name, _HERE / "train.py", *flags, devices=devices, status=75 if stops else 0)
    said = "SIGTERM on rank 0: the same command resumes" if stops else "finished at step"
    checks.require(said in output, f"{name} does not say {said!r}")


def check_benchmarks(checks: Checks) -> None:
    """Run the measurements of `make gpu-check`, for its flags and tables."""
    small = ["--preset", "tiny", "--vocab-size", 400, "--tokens", 2_048]
    checks.run("kernels", ROOT / "tools/benchmark.py", "kernels", *small)
    step = ["--preset", "tiny", "--data", checks.scratch / "data", "--steps", 1, "--rounds", 1]
    checks.run("step", ROOT / "tools/benchmark.py", "step", *step)


def check_slot(checks: Checks) -> None:
    """Rehearse `make gpu-slot`. Values are not real, so that some checks fail; each must come to its figures."""
    folders = ["--work", checks.scratch / "slot", "--out", checks.scratch]
    checks.run("gpu-slot", _HERE / "slot.py", *folders, covered=False, status=1, seconds=3_600)
    (file,) = checks.scratch.glob("gpu-slot-*.json")
    found = read_json(file)["figures"]
    checks.figures["gpu_slot_seconds"] = {name: check["seconds"] for name, check in found.items()}
    checks.require(found["graphs"]["graphs yes"]["used"], "gpu-slot: no graphs")
    for name, check in found.items():
        figures = check.keys() - {"state", "date", "limit", "seconds"}
        checks.require(bool(figures), f"gpu-slot, {name}: no figures ({check['state']})")


def check_doctor(checks: Checks) -> None:
    """Run the preflight on two devices that compute nothing: it must refuse them, and nothing else on their account."""
    found = json.loads(checks.run("doctor", _HERE / "doctor.py", devices=2).splitlines()[-1])
    states = {check["name"]: check for check in found}
    gpus = states.get("GPUs", {"found": "no such check", "state": ""})
    refused = gpus["state"] == "fail" and "a product of matrices is wrong" in gpus["found"]
    checks.require(refused, f"doctor takes a GPU that computes nothing: {gpus['found']}")


_CHECKS = (
    check_kernels,
    check_steps,
    check_stages,
    check_softmax,
    check_decoding,
    check_runs,
    check_slot,
    check_doctor,
    check_benchmarks,
)


def lines_not_run(checks: Checks) -> Iterator[str]:
    """Yield the lines of the package that name CUDA and that no program ran: `file:line: text`."""
    coverage, report = [checks.home.python, "-m", "coverage"], checks.scratch / "coverage.json"
    file = f"--data-file={checks.scratch}/.coverage"
    for words in (["combine", "--quiet", file], ["json", "--quiet", file, "-o", report]):
        subprocess.run([*coverage, *words], cwd=checks.scratch, check=True)
    for name, found in sorted(read_json(report)["files"].items()):
        path = Path(name) if Path(name).is_absolute() else checks.scratch / name
        lines = path.read_text(encoding="utf-8").splitlines()
        for number in found["missing_lines"]:
            if "cuda" in (text := lines[number - 1].strip()).lower():
                yield f"{path.relative_to(ROOT)}:{number}: {text}"


if __name__ == "__main__":
    exit_on_user_error(main)
