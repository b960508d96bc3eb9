"""What a run reports: the terminal, `metrics.jsonl` and TensorBoard. Only rank 0 writes."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The columns of the terminal, in order; the files hold everything.
_SHOWN = {
    "loss": "{:.3f}",
    "ppl": "{:.2f}",
    "learning_rate": "{:.2e}",
    "gradient_norm": "{:.2f}",
    "target_tokens_per_second": "{:,.0f}",
}
_LABELS = {"learning_rate": "lr", "gradient_norm": "norm", "target_tokens_per_second": "tok/s"}


class Reporter:
    """Writes records; a no-op on other ranks than 0."""

    def __init__(self, run_dir: Path, *, is_main: bool, max_steps: int, first_step: int) -> None:
        self.is_main = is_main
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        self.max_steps = max_steps
        # A bar in a terminal; in a log file, plain lines without carriage returns.
        self.bar = None
        if sys.stderr.isatty():
            form = "{n_fmt}/{total_fmt} |{bar:8}| {remaining} left  {desc}"
            self.bar = tqdm(total=max_steps, initial=first_step, bar_format=form, dynamic_ncols=True, smoothing=0.05)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Keep `values` of `step`; `kind` is `train`, `valid`, `checkpoint` or `end`."""
        if not self.is_main:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        self.file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def train_line(self, step: int, values: dict[str, Any], seconds_left: float) -> None:
        if not self.is_main:
            return
        shown = {name: f"{_LABELS.get(name, name)} {form.format(values[name])}" for name, form in _SHOWN.items()}
        if self.bar is not None:
            # Four figures and the bar fit 80 columns.
            self.bar.set_description_str(" ".join(v for k, v in shown.items() if k != "gradient_norm"), refresh=False)
        else:
            line = "  ".join(shown.values())
            self.say(f"step {step:>6}/{self.max_steps}  {line}  left {format_seconds(seconds_left)}")

    def advance(self) -> None:
        if self.is_main and self.bar is not None:
            self.bar.update()

    def say(self, text: str) -> None:
        if not self.is_main:
            return
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.is_main:
            if self.bar is not None:
                self.bar.close()
                self.bar = None
            self.file.close()
            self.board.close()


def format_seconds(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def perplexity(nll: float) -> float:
    """exp(nll per token), not smoothed; infinite where that overflows."""
    return math.inf if nll >= 700 else math.exp(nll)


def read_records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's `metrics.jsonl`, in order."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["kind"] == kind]
