"""A training that computes nothing: it starts, logs, saves and resumes by the code of a real one."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dist_transformer.base.sole_writer import Fence
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.model.transformer import Transformer
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention
from dist_transformer.run.environment import record_environment
from dist_transformer.run.folder import describe_run, open_run, run_identity
from dist_transformer.run.layout import LEDGER_FILE, METRICS_FILE
from dist_transformer.run.ledger import Ledger, left_out_records, read_ledger
from dist_transformer.run.progress import Progress
from tests.support.tiny import tiny_config

MODEL = tiny_config(width=8, ffn_width=8, max_positions=16, vocab_size=5, norm="pre")
TOKENIZER = b'{"pieces": []}'
DS_CONFIG = {"zero_optimization": {"stage": 1}}


def small_config(folder: Path, *, data_name: str = "data", **changes: Any) -> TrainConfig:
    """Settings of a run in `folder`/run over hand-written data, which is made."""
    data = folder / data_name
    data.mkdir(parents=True, exist_ok=True)
    (data / "index.json").write_text('{"corpus": "hand-written"}')
    (data / "tokenizer.json").write_bytes(TOKENIZER)
    return PRESETS["tiny"].changed(**{"data": (str(data),), "run_dir": folder / "run", "model": MODEL, **changes})


def small_states(step: int, *, averaged: bool) -> Iterator[ParameterState]:
    torch.manual_seed(step)
    kept = (*MOMENTS, EMA) if averaged else MOMENTS
    for name, parameter in Transformer(MODEL).named_parameters():
        yield ParameterState(name=name, weight=parameter.data, moments=dict.fromkeys(kept, parameter.data * 0))


class SmallRun:
    """One start of the run of some settings; it holds the run folder until `held` is closed.

    Args:
        fenced: makes another fence of the folder's.
        keep: of checkpoints and of weight files.
    """

    def __init__(
        self,
        config: TrainConfig,
        held: ExitStack,
        *,
        fenced: Callable[[Fence], Fence] = lambda fence: fence,
        keep: int = 2,
    ) -> None:
        (data,) = (Path(place) for place in config.corpora.data)
        self.run_dir, self.keep, self.ema_decay = config.run_dir, keep, config.ema_decay
        self.described = describe_run(config, [data], DS_CONFIG)
        self.identity = run_identity(self.described)
        folder: Any = SimpleNamespace(path=data)
        origin, self.notes, fence = open_run(config, self.described, folder, held)
        fence = fenced(fence)
        is_resumed = isinstance(origin, CheckpointReader)
        self.progress = Progress.from_json(origin.state) if isinstance(origin, CheckpointReader) else Progress()
        self.resumed_at = self.progress.step if is_resumed else None
        self.ledger = Ledger(self.run_dir / LEDGER_FILE, chain=self.progress.ledger_chain, fence=fence)
        self.writer = CheckpointWriter(
            self.run_dir,
            config=self.described,
            flushed=(self.ledger.path, self.run_dir / METRICS_FILE),
            fence=fence,
        )
        self.reporter = Reporter(
            self.run_dir, is_main=True, max_steps=99, first_step=self.progress.step, quiet=True, fence=fence
        )
        self.reporter.fence()
        record_environment(self.run_dir, {}, step=self.progress.step)
        held.callback(self.writer.close)

    def train(self, steps: int, left_out: tuple[LeftOut, ...] = ()) -> None:
        """Count steps and log each; `left_out` of each are shards that it lacks."""
        for _ in range(steps):
            self.progress.step += 1
            step = self.progress.step
            self.ledger.add(step, pair_hash=7 * step, target_tokens=100 + step, left_out=left_out)
            self.progress.target_tokens += 100 + step
            self.ledger.flush()
            if left_out:
                self.progress.left_out = left_out_records(read_ledger(self.ledger.path))
            self.progress.ledger_chain = self.ledger.chain
            self.reporter.record("train", step, {"loss": 1 / step})

    def save(self) -> Path:
        """Save, and wait until it is done."""
        described = {
            "model": to_plain(MODEL),
            "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
            "run": self.identity,
            "ema_decay": self.ema_decay,
        }
        self.writer.start(
            small_states(self.progress.step, averaged=self.ema_decay > 0),
            {**self.progress.to_json(), **described, "updates": self.progress.step},
            retention=Retention(checkpoints=self.keep, weights=self.keep),
            weights_metadata={
                "step": str(self.progress.step),
                "run": json.dumps(self.identity),
                "model": json.dumps(to_plain(MODEL)),
                "train_seconds": json.dumps(self.progress.train_seconds),
            },
        )
        saved = self.writer.wait()
        assert saved is not None
        self.reporter.record("checkpoint", saved.step, {"seconds": saved.seconds})
        return saved.path


def train_and_save(config: TrainConfig, *steps: int, rest: int = 0, keep: int = 2) -> SmallRun:
    """Start, train the given number of steps before each save, then the rest without one, and end."""
    with ExitStack() as held:
        run = SmallRun(config, held, keep=keep)
        for count in steps:
            run.train(count)
            run.save()
        run.train(rest)
        run.reporter.close()
    return run
