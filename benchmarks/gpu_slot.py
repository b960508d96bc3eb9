"""Fifteen minutes on a GPU: check first what no other machine can show; write results/speed/gpu-slot-DEVICE.json.

    1  card       clocks, temperature, errors, bf16 products, copies
       steps      a step of big at 3.5k to 28k tokens, compiled or not
       ranks      2 and 4 ranks on the one GPU over gloo, ZeRO 0 to 3, killed and resumed; losses as on one rank
    2  nccl       collectives of one rank
       save       the pause and the memory of a checkpoint of big
       graphs     steps of big at 3.5k tokens with and without a CUDA graph: losses, rates
       tests      the tests that are marked gpu
       test-mode  `train --test-mode`

Each half takes five minutes at most, because each check has a limit of its own. A figure is written as soon as it is
measured. A check that passed today is not repeated, so the same command continues. No data is needed.
"""

import datetime
import functools
import gc
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import ROOT, device_name, read_flags, result_of, say, spread, write_result
from benchmarks.training.random_packs import make_engine, random_batch, random_config, train_step
from dist_transformer.base.errors import UserError, exit_on_user_error
from dist_transformer.config.plain import read_json
from dist_transformer.run.layout import METRICS_FILE, read_records
from dist_transformer.runtime import device as devices
from dist_transformer.runtime.launch import free_port
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

# Also the one of a rehearsal, which begins in another way.
_PROGRAM = str(Path(sys.argv[0]).absolute())
Figures = Iterator[tuple[str, Any]]
# 392 target tokens each.
_PACKS = (72, 36, 18, 9)
_RANKS = [(ranks, stage) for ranks in (2, 4) for stage in (1, 3, 2, 0)]
_KILLED = [(2, 1), (2, 3)]
_STEPS, _KILLED_AFTER = 8, 4
# Of losses in fp32: sums of other orders.
_MOST_APART = 1e-3
_HEALTH = (
    "name,driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit,"
    "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active,pcie.link.gen.current,pcie.link.width.current"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    part: tuple[int, ...] = (1, 2)
    """Halves."""
    check: str | None = None
    """Measure this in this process, and print its figures."""
    work: Path = ROOT / "runs/gpu-slot"
    """Folder for runs and logs."""
    out: Path = ROOT / "results/speed"
    """Folder of the result."""


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2:])
        return
    settings = read_flags(Settings)
    if settings.check:
        for name, figure in CHECKS[settings.check].measure(settings.work):
            print(json.dumps({name: figure}), flush=True)
        return
    if not torch.cuda.is_available():
        say("nothing is checked, because there is no GPU here")
        return
    failed = [name for name, check in CHECKS.items() if check.part in settings.part and not passes(name, settings)]
    if failed:
        raise UserError(f"{', '.join(failed)} failed: {settings.work} has their logs")


def train(flags: list[str]) -> None:
    """Train as one rank of a launch; several share the GPU, over gloo, because NCCL refuses that."""
    join = dist.init_process_group

    def join_over_gloo(backend: str, **settings: Any) -> None:
        # DeepSpeed chooses its device by it.
        os.environ["LOCAL_RANK"] = "0"
        join(backend.replace("cuda:nccl", "cuda:gloo"), **settings)

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        devices._gpu_of = lambda world: 0
        dist.init_process_group = join_over_gloo  # type: ignore[assignment]
    sys.argv[1:] = flags
    from dist_transformer.train import main as train_rank

    exit_on_user_error(train_rank, prints=False)


def passes(name: str, settings: Settings) -> bool:
    """Run a check in a process of its own, write its figures as they come, and return whether it passes."""
    check, started = CHECKS[name], time.monotonic()
    file = settings.out / f"gpu-slot-{device_name()}.json"
    today = datetime.date.today().isoformat()
    before = read_json(file)["figures"] if file.exists() else {}
    if (before.get(name, {}).get("state"), before.get(name, {}).get("date")) == ("ok", today):
        say(f"{name}: passed today")
        return True
    settings.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"state": "runs", "date": today, "limit": check.seconds}

    def write(state: str) -> None:
        found.update(state=state, seconds=round(time.monotonic() - started, 1))
        result = result_of(
            None,
            what="`make gpu-slot`: fifteen minutes on a GPU",
            command="make gpu-slot",
            seeds=[0],
            wall_seconds=round(sum(each["seconds"] for each in {**before, name: found}.values()), 1),
            figures={**before, name: found},
        )
        write_result(file, result)

    log = settings.work / f"{name}.log"
    command = [sys.executable, _PROGRAM, "--check", name, "--work", str(settings.work)]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        timer = threading.Timer(check.seconds, _kill, (process.pid,))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            # Libraries print too.
            if line.startswith("{"):
                found.update(json.loads(line))
                write("runs")
        late = not timer.is_alive()
        timer.cancel()
    last = next(iter(log.read_text(errors="replace").strip().splitlines()[::-1]), "")
    # Such as by Linux, whose memory is full.
    last = f"ended by signal {-process.returncode}" if process.returncode < 0 else last[-300:]
    state = "ok" if process.returncode == 0 else "out of time" if late else f"failed: {last}"
    write(state)
    say(f"{name}: {state}, {found['seconds']:.0f} of {check.seconds} s")
    return state == "ok"


def _kill(process: int) -> None:
    """End a process and all that it started; ranks of torchrun have process groups of their own."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                _kill(int(child))
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def measure_card(work: Path) -> Figures:
    from benchmarks.training.field import product_rate

    if program := shutil.which("nvidia-smi"):
        done = subprocess.run(
            [program, f"--query-gpu={_HEALTH}", "--format=csv,noheader"], check=True, capture_output=True, text=True
        )
        yield "health", dict(zip(_HEALTH.split(","), done.stdout.splitlines()[0].split(", "), strict=True))
    device = torch.device("cuda", 0)
    yield "torch", [torch.__version__, torch.version.cuda, *torch.cuda.get_device_capability(device)]
    yield "product_flops_per_second", product_rate(device, seconds=2)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    ours, other = (torch.empty(2**28, dtype=torch.uint8, device=device) for _ in range(2))
    for name, into, of in (("on_device", other, ours), ("to_device", ours, host), ("from_device", host, ours)):
        rate = _rate(functools.partial(into.copy_, of, non_blocking=True))
        yield f"copied_gb_per_second_{name}", rate * host.nbytes / 1e9


def _rate(work: Callable[[], object], *, times: int = 20) -> float:
    """Measure how often per second the GPU does something."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return times / (time.perf_counter() - started)


def measure_steps(work: Path) -> Figures:
    with process_group(World(), single=True) as device:
        for packs in _PACKS:
            for compile in (True, False):
                gc.collect()
                torch.cuda.empty_cache()
                torch._dynamo.reset()
                torch.cuda.reset_peak_memory_stats()
                config = random_config("big", packs=packs, at_once=packs, compile=compile)
                engine, batch = make_engine(config, device, stage=1), random_batch(config, 0)
                tokens = int((batch.labels_T >= 0).sum())
                started = time.monotonic()
                for _ in range(3):
                    train_step(engine, [batch])
                torch.cuda.synchronize()
                warm = time.monotonic() - started
                rates = [tokens * _rate(functools.partial(train_step, engine, [batch]), times=4) for _ in range(3)]
                figures = {
                    "target_tokens": tokens,
                    "target_tokens_per_second": spread(rates),
                    "warm_up_seconds": warm,
                    "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                }
                yield f"{packs * 392}{' compiled' if compile else ''}", figures
                del engine, batch


def measure_ranks(work: Path) -> Figures:
    alone = _losses(work, ranks=1, stage=1)
    yield "losses", alone
    failed = []
    for ranks, stage in _RANKS:
        started = time.monotonic()
        killed = (ranks, stage) in _KILLED
        name = f"{ranks} ranks, ZeRO-{stage}{', killed and resumed' if killed else ''}"
        try:
            losses = _losses(work, ranks=ranks, stage=stage, killed=killed)
        except subprocess.CalledProcessError:
            losses = []
        figures: dict[str, Any] = {"losses": losses, "seconds": time.monotonic() - started}
        if losses:
            figures["farthest_loss"] = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
        if not figures.get("farthest_loss", math.inf) <= _MOST_APART:
            failed.append(name)
        yield name, figures
    if failed:
        raise UserError(f"losses are not those of one rank within {_MOST_APART:g}: {'; '.join(failed)}")


def _losses(work: Path, *, ranks: int, stage: int, killed: bool = False) -> list[float]:
    """Train a small model, and return the loss of each step."""
    run_dir = _new(work / f"ranks-{ranks}-{stage}")
    flags = ["--preset", "tiny", "--data", _data(work), "--run-dir", run_dir, "--precision", "fp32", "--log-every", 1]
    flags += ["--deepspeed-config", f"zero{stage}", "--batch.packs-per-step", 8, "--batch.packs-per-micro-batch", 1]
    flags += ["--optimizer.epsilon", 1e-6, "--validate-every", 0, "--save-every", 2, "--max-steps", _STEPS]
    if killed:
        process = subprocess.Popen(_launch(ranks, *flags), stdout=sys.stderr)
        try:
            while process.poll() is None and _KILLED_AFTER not in {each["step"] for each in _saved(run_dir)}:
                time.sleep(0.02)
        finally:
            _kill(process.pid)
            process.wait()
    subprocess.run(_launch(ranks, *flags), check=True, stdout=sys.stderr)
    return [record["loss"] for record in read_records(run_dir, "train")]


def _saved(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_records(run_dir, "checkpoint")) if (run_dir / METRICS_FILE).exists() else []


def _launch(ranks: int, *flags: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return [sys.executable, *(launcher if ranks > 1 else []), _PROGRAM, "--train", *map(str, flags)]


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _data(work: Path) -> Path:
    """Prepare the synthetic corpus, once."""
    data = work / "data"
    if not (data / "index.json").exists():
        flags = ["--toy", "2000", "--vocab-size", "400", "--out", str(data)]
        subprocess.run([sys.executable, "-m", "dist_transformer", "prepare", *flags], check=True, stdout=sys.stderr)
    return data


def measure_nccl(work: Path) -> Figures:
    with process_group(World(), single=True) as device:
        yield "version", list(torch.cuda.nccl.version())
        parts = torch.full((2**26,), 2.0, device=device, dtype=torch.bfloat16)
        whole = torch.empty_like(parts)
        for name, collective in (
            ("all_reduce", lambda: dist.all_reduce(parts)),
            ("all_gather", lambda: dist.all_gather_into_tensor(whole, parts)),
            ("reduce_scatter", lambda: dist.reduce_scatter_tensor(whole, parts)),
        ):
            yield f"{name}_gb_per_second", _rate(collective) * parts.nbytes / 1e9
        if not torch.equal(whole, parts) or parts[0].item() != 2.0:
            raise UserError("a collective of one rank changes its values")


def measure_save(work: Path) -> Figures:
    run_dir = _new(work / "save")
    flags = ["--preset", "big", "--data", _data(work), "--run-dir", run_dir, "--batch.packs-per-step", 8]
    flags += ["--log-every", 1, "--validate-every", 0, "--save-every", 4, "--max-steps", 8]
    subprocess.run(_launch(1, *flags), check=True, stdout=sys.stderr)
    yield "saves", [{name: each[name] for name in ("step", "seconds", "stall")} for each in _saved(run_dir)]
    yield "peak_host_gib", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    yield "checkpoint_gb", sum(file.stat().st_size for file in (run_dir / "checkpoints").rglob("*.*")) / 1e9
    _new(run_dir)


def measure_graphs(work: Path) -> Figures:
    losses = {}
    with process_group(World(), single=True) as device:
        for graphs in ("no", "yes"):
            config = random_config("big", packs=9, at_once=9, compile=False).changed(cuda_graphs=graphs)
            engine, batches = make_engine(config, device, stage=1), [random_batch(config, seed) for seed in range(4)]
            losses[graphs] = [float(train_step(engine, [batch], graph=True)) for batch in batches]
            rate = _rate(functools.partial(train_step, engine, batches[:1], graph=True))
            yield f"graphs {graphs}", {"losses": losses[graphs], "steps_per_second": rate, "used": engine.has_graph}
            if engine.has_graph != (graphs == "yes"):
                raise UserError("the engine uses no graph: its log says why")
            del engine
            gc.collect()
    if not all(abs(one / other - 1) <= _MOST_APART for one, other in zip(*losses.values(), strict=True)):
        raise UserError(f"losses with a graph are not those without within {_MOST_APART:g}")


def measure_tests(work: Path) -> Figures:
    from benchmarks.gpu_check import run_tests

    for _, result in run_tests(seconds=CHECKS["tests"].seconds):
        yield "outcome", result["figures"]["outcome"]


def measure_test_mode(work: Path) -> Figures:
    flags = ["--preset", "tiny", "--data", _data(work), "--test-mode"]
    done = subprocess.run(_launch(1, *flags), check=False, stdout=subprocess.PIPE, text=True)
    yield "table", [line for line in done.stdout.splitlines() if "  ok  " in line or "  FAIL  " in line]
    if done.returncode:
        raise UserError(f"train --test-mode has status {done.returncode}")


@dataclass(frozen=True, slots=True)
class _Check:
    part: int
    seconds: int
    """Its limit."""
    measure: Callable[[Path], Figures]


CHECKS = {
    "card": _Check(1, 20, measure_card),
    "steps": _Check(1, 120, measure_steps),
    "ranks": _Check(1, 155, measure_ranks),
    "nccl": _Check(2, 20, measure_nccl),
    "save": _Check(2, 45, measure_save),
    "graphs": _Check(2, 35, measure_graphs),
    "tests": _Check(2, 150, measure_tests),
    "test-mode": _Check(2, 45, measure_test_mode),
}
