import dataclasses
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dist_transformer.config.presets import PRESETS
from dist_transformer.data.loading.events import EpochSummary, Totals
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.evaluation.samples import Sample, SampleSheet
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.reporting.reporter import Reporter, format_seconds, perplexity, samples_table
from dist_transformer.run.records import read_records

VALUES = {
    "loss": 1.5,
    "nll": 1.25,
    "ppl": 3.49,
    "learning_rate": 3e-4,
    "gradient_norm": 0.75,
    "target_tokens_per_second": 12345.6,
    "fill": 0.987,
    "data_stall": 0.004,
    "skipped_steps": 0,
}


@pytest.fixture
def reporter(tmp_path: Path) -> Any:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0)
    yield reporter
    reporter.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (0.4, "0:00"),
        (0.6, "0:01"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (61, "1:01"),
        (600, "10:00"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    # The paper's base model, newstest2013: 4.92 per piece.
    assert perplexity(1.5933085) == pytest.approx(4.92, rel=1e-6)
    assert perplexity(699.0) < math.inf
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """As a strict parser reads them: NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_records_are_json_with_null_where_a_number_is_not_finite(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 1, {"loss": math.nan, "ppl": math.inf, "norm": -math.inf, "rate": 0.5, "note": "ä"})
    # Each line is there at once: a killed run keeps what it reported.
    assert lines_of(tmp_path) == [
        {"kind": "train", "step": 1, "loss": None, "ppl": None, "norm": None, "rate": 0.5, "note": "ä"}
    ]


def test_records_of_a_kind(reporter: Reporter, tmp_path: Path) -> None:
    for step in (1, 2):
        reporter.record("train", step, {"loss": float(step)})
        reporter.record("valid", step, {"loss": 10.0 * step})
    assert [record["loss"] for record in read_records(tmp_path, "valid")] == [10.0, 20.0]
    assert read_records(tmp_path, "end") == []


def epoch_of(corpus: int) -> EpochSummary:
    return EpochSummary(
        corpus=corpus,
        epoch=2,
        budgets=Budgets(max_source_tokens=100, max_target_tokens=300, max_sentences=9),
        totals=Totals(packs=10, pairs=1234, source_tokens=900, target_tokens=2940),
        unfit_pairs=7,
        left_out_pairs=50,
    )


def test_an_epoch_by_hand(reporter: Reporter, tmp_path: Path) -> None:
    """900 of 10 · 100 source tokens, 2,940 of 10 · 300 target tokens, 3,840 of 4,000 together."""
    text = reporter.epoch(35, epoch_of(0))
    assert text == "epoch 3 done, 96% full"
    assert lines_of(tmp_path) == [
        {
            "kind": "epoch",
            "step": 35,
            "corpus": 0,
            "epoch": 2,
            "packs": 10,
            "pairs": 1234,
            "source_tokens": 900,
            "target_tokens": 2940,
            "fill": 0.96,
            "source_fill": 0.9,
            "target_fill": 0.98,
            "unfit_pairs": 7,
            "left_out_pairs": 50,
        }
    ]
    reporter.close()
    assert scalars(tmp_path)["z_more/epoch/pairs"] == [(35, 1234.0)]
    assert scalars(tmp_path)["z_more/epoch/fill"] == [(35, pytest.approx(0.96))]


def test_epochs_of_several_corpora_are_told_apart(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0, corpora=["news", "talks"])
    texts = [reporter.epoch(35, epoch_of(corpus)) for corpus in (0, 1)]
    assert texts == ["epoch 3 of news done, 96% full", "epoch 3 of talks done, 96% full"]
    assert [record["corpus"] for record in read_records(tmp_path, "epoch")] == [0, 1]
    reporter.close()
    assert {"z_more/epoch/corpus_1/fill", "z_more/epoch/corpus_2/fill"} <= scalars(tmp_path).keys()


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        reporter = Reporter(tmp_path, is_main=True, max_steps=9, first_step=step - 1)
        reporter.record("train", step, {"loss": 1.0})
        reporter.close()
    assert [record["step"] for record in lines_of(tmp_path)] == [1, 2]


def test_a_log_file_has_plain_lines_without_carriage_returns(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not sys.stderr.isatty()
    assert reporter.bar is None
    reporter.train_line(50, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "step  50/100  loss  1.500  ppl    3.49  tok/s    12,346  fill  99%  data stall   0%  left 1:01\nsaved\n"
    )


def test_columns_stay_in_place_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=300_000, first_step=0)
    early = {"loss": 11.25, "ppl": 37_000.4, "target_tokens_per_second": 850.0, "data_stall": 1.0, "mfu": 0.004}
    late = {"loss": 1.0, "ppl": 4.5, "target_tokens_per_second": 1_987_654.0, "fill": 1.0, "mfu": 0.4151}
    for step, values in ((50, early), (300_000, late)):
        reporter.train_line(step, {**VALUES, **values}, seconds_left=360_000)
    reporter.close()
    first, second = capsys.readouterr().out.splitlines()
    names = ("loss", "ppl", "tok/s", "fill", "data stall", "mfu", "left")
    assert [first.index(name) for name in names] == [second.index(name) for name in names]
    assert "ppl 3.7e+04" in first
    assert second.endswith("tok/s 1,987,654  fill 100%  data stall   0%  mfu  42%  left 100:00:00")
    assert len(first) == len(second) <= 116


def test_numbers_that_are_not_finite_or_huge_are_shown(reporter: Reporter, capsys: pytest.CaptureFixture[str]) -> None:
    for loss, ppl in ((math.nan, math.nan), (690.0, 1e300), (math.inf, math.inf)):
        reporter.train_line(1, {**VALUES, "loss": loss, "ppl": ppl}, seconds_left=0)
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"loss +nan +ppl +nan ", lines[0])
    assert re.search(r"loss +690.000 +ppl +1.0e\+300 ", lines[1])
    assert re.search(r"loss +inf +ppl +inf", lines[2])
    assert max(map(len, lines)) <= 105


# Numbers as wide as they come, resumed far into the run; the reporter is all that it writes.
IN_A_TERMINAL = """
import sys, time
from pathlib import Path
from dist_transformer.reporting.reporter import Reporter
figures = {"loss": 10.138, "nll": 9.0, "ppl": 8737.92, "fill": 0.99, "data_stall": 0.012, "mfu": 0.415}
reporter = Reporter(Path(sys.argv[1]), is_main=True, max_steps=300_000, first_step=99_990)
reporter.say("begin")
for step in range(99_991, 100_000):
    reporter.advance()
    if step % 3 == 0:
        reporter.train_line(step, {**figures, "target_tokens_per_second": 1234567.8}, seconds_left=3000)
        reporter.say(f"step {step}: saved")
    time.sleep(0.12)
reporter.close()
"""


def screen_lines(output: str) -> list[str]:
    """What stood in a line of the terminal at any time."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", output) if line.strip()]


def run_in_terminal(program: list[str], columns: int) -> str:
    """Output of a program whose input, output and errors are a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    # At the end of the program Linux gives an error instead of nothing to read.
    try:
        while part := os.read(ours, 65536):
            output += part
    except OSError:
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, output
    return output.decode()


@pytest.mark.system
@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (200, " loss 10.138 ppl 8737.92 tok/s 1,234,568 fill 99% data stall 1% mfu 42%"),
        (120, " loss 10.138 ppl 8737.92 tok/s 1,234,568 fill 99% data stall 1% mfu 42%"),
        (80, " loss 10.138 ppl 8737.92 tok/s 1,234,568"),
        (60, " loss 10.138"),
        (40, " loss 10.138"),
        # The width is not known: 80 is taken.
        (0, " loss 10.138 ppl 8737.92 tok/s 1,234,568"),
    ],
)
def test_the_bar_is_as_wide_as_its_terminal(tmp_path: Path, columns: int, figures: str) -> None:
    output = run_in_terminal([sys.executable, "-c", IN_A_TERMINAL, str(tmp_path)], columns)
    lines = screen_lines(output)
    room = (columns or 80) - 1
    assert max(map(len, lines)) <= room
    bars = [line for line in lines if "/300000" in line]
    assert len(bars) >= 5
    # Figures come whole or not at all. A narrow terminal has them in place of the bar, which else takes all the rest.
    place = "" if columns == 40 else r"\|.{8,}\| "
    assert all(re.fullmatch(rf"\d+/300000 {place}\S+ left({re.escape(figures)})?", line) for line in bars), bars
    if columns != 40:
        assert {len(line) for line in bars} == {room}
    assert bars[-1].startswith("99999/300000 ")
    assert bars[-1].endswith(figures)
    assert [line for line in lines if line not in bars] == [
        "begin",
        "step 99993: saved",
        "step 99996: saved",
        "step 99999: saved",
    ]
    assert "\x1b" not in output


def test_the_bar_follows_the_width_of_its_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [119]
    monkeypatch.setattr("dist_transformer.reporting.reporter._terminal_room", lambda: room[0])
    for stream in (sys.stderr, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=40)
    reporter.train_line(41, VALUES, seconds_left=61)
    # Drawn at each step, however fast they are.
    reporter.bar.mininterval = 0

    def drawn() -> str:
        return screen_lines(capsys.readouterr().err)[-1]

    reporter.advance()
    wide = drawn()
    assert wide.endswith("tok/s 12,346 fill 99% data stall 0%")
    assert len(wide) == 119
    room[0] = 39
    reporter.advance()
    assert re.fullmatch(r"42/100 \S+ left loss 1.500", drawn())
    # A message and the end draw it too.
    for place, draw in ((159, lambda: reporter.say("saved")), (99, reporter.close)):
        room[0] = place
        draw()
        assert len(drawn()) == place


@pytest.mark.system
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_goes_to_a_file_gives_plain_lines(tmp_path: Path, stream: str) -> None:
    """`train > log` and `train 2> log` in a terminal."""
    log = tmp_path / "log"
    redirect = f'exec {"1" if stream == "stdout" else "2"}> {log}; exec {sys.executable} -c "$0" {tmp_path}'
    screen = run_in_terminal(["sh", "-c", redirect, IN_A_TERMINAL], 80)
    lines = (log.read_text() if stream == "stdout" else screen.replace("\r\n", "\n")).splitlines(keepends=True)
    assert [line.split()[1] for line in lines if "loss" in line] == ["99993/300000", "99996/300000", "99999/300000"]
    assert len(lines) == 7
    assert not re.search(r"[\r\x1b]", "".join(lines))
    # The other stream has nothing to say.
    assert (screen if stream == "stdout" else log.read_text()) == ""


def test_a_quiet_reporter_keeps_records_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0, quiet=True)
    reporter.train_line(50, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    reporter.record("train", 50, {"loss": 1.0})
    reporter.close()
    assert capsys.readouterr() == ("", "")
    assert read_records(tmp_path, "train") == [{"kind": "train", "step": 50, "loss": 1.0}]


def test_a_record_that_is_there_is_found(reporter: Reporter) -> None:
    reporter.record("end", 12, {"train_seconds": 1.0})
    assert reporter.has_recorded("end", 12)
    assert not reporter.has_recorded("end", 1)
    assert not reporter.has_recorded("train", 12)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_reads_the_scalars(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 50, {"loss": 1.5, "steps": 3, "name": "no scalar"})
    reporter.record("train", 100, {"loss": 1.25, "steps": 4})
    reporter.record("valid", 100, {"loss": 1.75})
    reporter.close()
    assert scalars(tmp_path) == {
        "train/loss": [(50, 1.5), (100, 1.25)],
        "train/steps": [(50, 3.0), (100, 4.0)],
        "valid/loss": [(100, 1.75)],
    }


def test_a_resumed_run_replaces_the_scalars_after_its_checkpoint(tmp_path: Path) -> None:
    """Killed after step 150, resumed from step 100."""
    for first_step, steps, loss in ((0, (50, 100, 150), 2.0), (100, (150, 200), 1.0)):
        # TensorBoard reads files in the order of their names, which begin with the second of their making: here, as in
        # a run, those of the first start are older.
        for file in (tmp_path / "tensorboard").glob("*"):
            file.rename(file.with_name("events.out.tfevents.1000000000.host"))
        reporter = Reporter(tmp_path, is_main=True, max_steps=200, first_step=first_step)
        for step in steps:
            reporter.record("train", step, {"loss": loss})
        reporter.close()
    assert scalars(tmp_path) == {"train/loss": [(50, 2.0), (100, 2.0), (150, 1.0), (200, 1.0)]}


def test_single_points_are_behind_the_curves_or_no_charts(reporter: Reporter, tmp_path: Path) -> None:
    for step in (50, 100):
        reporter.record("train", step, {"loss": 1.5})
    reporter.record("valid", 100, {"nll": 1.75, "bleu": 30.0})
    reporter.record("checkpoint", 100, {"seconds": 2.0, "stall": 0.5})
    reporter.epoch(100, epoch_of(0))
    reporter.record("end", 100, {"train_seconds": 10.0, "world_size": 2})
    reporter.close()
    # The order of TensorBoard's groups.
    groups = sorted({tag.partition("/")[0] for tag in scalars(tmp_path)})
    assert groups == ["train", "valid", "z_more"]
    assert scalars(tmp_path)["z_more/checkpoint/stall"] == [(100, 0.5)]
    assert not [tag for tag in scalars(tmp_path) if "end" in tag or "world_size" in tag]


def test_the_best_validation_is_followed_through_a_resume(tmp_path: Path) -> None:
    """nll is not a number at first, falls to 1.5, and rises; the second start begins with what the first one found."""
    starts = [[(1, math.nan, 10.0), (2, 1.5, 12.0)], [(3, 1.75, 11.0), (4, 2.0, 13.0)]]
    for first_step, validations in zip((0, 2), starts, strict=True):
        reporter = Reporter(tmp_path, is_main=True, max_steps=4, first_step=first_step)
        for step, nll, bleu in validations:
            reporter.record("valid", step, {"nll": nll, "bleu": bleu})
        reporter.close()
    assert scalars(tmp_path)["valid/best_nll"] == [(2, 1.5), (3, 1.5), (4, 1.5)]
    assert scalars(tmp_path)["valid/best_bleu"] == [(1, 10.0), (2, 12.0), (3, 12.0), (4, 13.0)]
    # A view of TensorBoard's alone.
    assert lines_of(tmp_path)[0] == {"kind": "valid", "step": 1, "nll": None, "bleu": 10.0}


def test_settings_that_results_depend_on_are_shown(reporter: Reporter, tmp_path: Path) -> None:
    config = PRESETS["tiny"].changed(data=("data/news", "data/talks"), timeout_minutes=7.0)
    config = dataclasses.replace(config, compile=True, model=dataclasses.replace(config.model, head_width=1))
    reporter.settings(config)
    reporter.record("end", 100, {})
    reporter.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = {
        tag: HParamsPluginData.FromString(board.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)
        for tag in ("experiment", "session_start_info", "session_end_info")
    }
    values = found["session_start_info"].session_start_info.hparams
    assert values["model.width"].number_value == 128
    assert values["optimizer.peak_lr"].number_value == 3e-3
    assert values["max_steps"].number_value == 1000
    assert values["precision"].string_value == "bf16"
    assert values["data"].string_value == "data/news data/talks"
    assert values["compile"].string_value == "yes"
    # What may be left open is a text in each run; 1 is not "yes".
    assert values["model.head_width"].string_value == "1"
    assert values["batch.max_sentences"].string_value == "not given"
    assert not {"run_dir", "timeout_minutes", "log_every"} & set(values)
    metrics = [info.name.tag for info in found["experiment"].experiment.metric_infos]
    assert metrics[:4] == ["valid/best_nll", "valid/best_bleu", "valid/nll", "valid/bleu"]
    assert {info.name for info in found["experiment"].experiment.hparam_infos} == set(values)
    assert found["session_end_info"].session_end_info.status == Status.Value("STATUS_SUCCESS")


HOSTILE = r"a | b <b>x</b> &amp; *y* _z_ `c` ~~d~~ [l](u) # h \ 1. $x$ <script> https://a.b \| \* ![i](j)"


def make_sheet(step: int) -> SampleSheet:
    plain = Sample(
        source="A street.",
        reference="Eine Straße.",
        hypothesis="Die Straße 你好.",
        source_tokens=["A", "▁street", ".", "</s>"],
        target_tokens=["Die", "▁Straße", "</s>"],
        attention_LTS=[[[0.7, 0.1, 0.1, 0.1], [0.1, 0.8, 0.05, 0.05], [0.0, 0.0, 0.5, 0.5]]] * 2,
    )
    samples = (
        plain,
        dataclasses.replace(plain, source=HOSTILE, reference="- x\n\n# y", hypothesis="", attention_LTS=None),
        dataclasses.replace(plain, source="Second map"),
    )
    return SampleSheet(step=step, sentences=1014, bleu=30.125, signature="nrefs:1|case:lc|tok:13a", samples=samples)


class TableReader(HTMLParser):
    """Cells of the tables of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_the_table_shows_every_character_as_it_is() -> None:
    """Through TensorBoard's own rendering."""
    page = TableReader(markdown_to_safe_html(samples_table(make_sheet(1))))
    assert [[cell.strip() for cell in row] for row in page.rows] == [
        ["source", "reference", "hypothesis"],
        ["A street.", "Eine Straße.", "Die Straße 你好."],
        [HOSTILE, "- x # y", ""],
        ["Second map", "Eine Straße.", "Die Straße 你好."],
    ]
    assert page.tags == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.text.startswith("BLEU 30.12 on 1,014 sentences (nrefs:1|case:lc|tok:13a)")


def decoded(image: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(image)) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def test_tensorboard_reads_samples(reporter: Reporter, tmp_path: Path) -> None:
    for step in (250, 500):
        reporter.samples(make_sheet(step))
    # There while the run goes on.
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tag = "samples/text_summary"
    events = board.Tensors(tag)
    assert [event.step for event in events] == [250, 500]
    assert events[1].tensor_proto.string_val[0].decode() == samples_table(make_sheet(500))
    # One with maps is the first, the other the third.
    assert sorted(board.Tags()["images"]) == ["valid_attention/sample_1", "valid_attention/sample_2"]
    for tag in board.Tags()["images"]:
        images = board.Images(tag)
        assert [image.step for image in images] == [250, 500]
        pixels = decoded(images[-1].encoded_image_string)
        assert pixels.shape == (images[-1].height, images[-1].width, 3)
        assert 200 <= pixels.shape[0] <= 1000
        assert 400 <= pixels.shape[1] <= 1500
        # Maps in blue and black letters on white.
        blue = (pixels[..., 2].astype(int) - pixels[..., 0] > 60).mean()
        assert blue > 0.01
        assert (pixels.max(-1) < 60).mean() > 0.002
        assert 0.3 < (pixels.min(-1) == 255).mean() < 0.99


def test_tensorboard_reads_pictures(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=1000, first_step=200)
    steps = range(1, 1001)
    reporter.pictures(steps, [min(step, 400) / 400 for step in steps], sinusoidal_positions(64, 32).numpy())
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    pixels = {}
    for tag in ("z_more/schedule/learning_rate", "z_more/positions/encodings"):
        (image,) = board.Images(tag)
        assert image.step == 200
        pixels[tag] = decoded(image.encoded_image_string)
        assert min(pixels[tag].shape[:2]) >= 300
    table, curve = pixels["z_more/positions/encodings"].astype(int), pixels["z_more/schedule/learning_rate"]
    # Red above zero, blue below.
    assert (table[..., 0] - table[..., 2] > 60).mean() > 0.1
    assert (table[..., 2] - table[..., 0] > 60).mean() > 0.05
    assert 0.001 < (curve.min(-1) < 200).mean() < 0.2
    reporter.close()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=False, max_steps=100, first_step=0)
    reporter.record("train", 1, VALUES)
    reporter.train_line(1, VALUES, seconds_left=1)
    reporter.advance()
    reporter.say("saved")
    reporter.samples(make_sheet(1))
    reporter.pictures([1, 2], [0.5, 1.0], np.zeros((4, 4)))
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
