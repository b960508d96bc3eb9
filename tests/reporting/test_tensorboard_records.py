"""A run's records as TensorBoard reads them."""

import dataclasses
import io
import math
import re
from pathlib import Path

import lxml.html
import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.reporter import Reporter, samples_table
from tests.reporting.recorded import HOSTILE, epoch_of, lines_of, make_sheet, scalars


def test_tensorboard_reads_the_scalars(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 50, {"loss": 1.5, "steps": 3, "name": "no scalar"})
    reporter.record("train", 100, {"loss": 1.25, "steps": 4})
    reporter.record("valid", 100, {"loss": 1.75})
    reporter.close()
    assert scalars(tmp_path) == {
        "main/loss": [(50, 1.5), (100, 1.25)],
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
    assert scalars(tmp_path) == {"main/loss": [(50, 2.0), (100, 2.0), (150, 1.0), (200, 1.0)]}


def test_single_points_are_behind_the_curves_or_no_charts(reporter: Reporter, tmp_path: Path) -> None:
    for step in (50, 100):
        reporter.record("train", step, {"loss": 1.5, "learning_rate": 0.1, "data_stall": 0.0})
    reporter.record("valid", 100, {"nll": 1.75, "bleu": 30.0})
    reporter.record("checkpoint", 100, {"seconds": 2.0, "stall": 0.5})
    reporter.epoch(100, epoch_of(0))
    reporter.record("end", 100, {"train_seconds": 10.0, "world_size": 2})
    reporter.close()
    # The order of TensorBoard's groups, and its first page.
    groups = sorted({tag.partition("/")[0] for tag in scalars(tmp_path)})
    assert groups == ["main", "train", "valid", "z_more"]
    assert sorted(scalars(tmp_path))[:4] == ["main/bleu", "main/learning_rate", "main/loss", "train/data_stall"]
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


def test_the_best_ter_is_the_lowest_and_the_other_scores_are_the_highest(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=4, first_step=0)
    for step, value in ((1, 50.0), (2, 70.0), (3, 60.0)):
        reporter.record("valid", step, dict.fromkeys(("ter", "chrf", "command"), value))
    reporter.close()
    found = scalars(tmp_path)
    assert found["valid/best_ter"] == [(1, 50.0), (2, 50.0), (3, 50.0)]
    assert found["valid/best_chrf"] == found["valid/best_command"] == [(1, 50.0), (2, 70.0), (3, 70.0)]
    assert found["valid/ter"] == [(1, 50.0), (2, 70.0), (3, 60.0)]


def test_training_and_validation_are_in_one_chart(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 100, {"loss": 4.0, "nll": 3.0})
    reporter.record("valid", 100, {"loss": 4.5, "nll": 2.5, "bleu": 10.0})
    reporter.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (event,) = board.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    tags = scalars(tmp_path)
    charts = {
        chart.title: {tag for pattern in chart.multiline.tag for tag in tags if re.match(pattern, tag)}
        for chart in category.chart
    }
    assert charts["loss: training and validation"] == {"main/loss", "valid/loss"}
    assert charts["nll per token, unsmoothed: training and validation"] == {"train/nll", "valid/nll"}
    assert charts["BLEU: validation, and the best so far"] == {"main/bleu", "valid/best_bleu"}


def test_settings_that_results_depend_on_are_shown(reporter: Reporter, tmp_path: Path) -> None:
    config = PRESETS["tiny"].changed(data=("data/news", "data/talks"), timeout_minutes=7.0, precision="bf16")
    config = dataclasses.replace(config, compile="on", model=dataclasses.replace(config.model, head_width=1))
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
    assert values["compile"].string_value == "on"
    # What may be left open is a text in each run; 1 is not "yes".
    assert values["model.head_width"].string_value == "1"
    assert values["batch.max_sentences"].string_value == "not given"
    assert not {"run_dir", "timeout_minutes", "log_every"} & set(values)
    metrics = [info.name.tag for info in found["experiment"].experiment.metric_infos]
    assert metrics[:4] == ["valid/best_nll", "valid/best_bleu", "valid/nll", "main/bleu"]
    assert {info.name for info in found["experiment"].experiment.hparam_infos} == set(values)
    assert found["session_end_info"].session_end_info.status == Status.Value("STATUS_SUCCESS")


def test_the_table_shows_every_character_as_it_is() -> None:
    """Through TensorBoard's own rendering."""
    page = lxml.html.fragment_fromstring(markdown_to_safe_html(samples_table(make_sheet(1))), create_parent="main")
    assert [[cell.text_content().strip() for cell in row] for row in page.iter("tr")] == [
        ["source", "reference", "hypothesis"],
        ["A street.", "Eine Straße.", "Die Straße 你好."],
        [HOSTILE, "- x # y", ""],
        ["Second map", "Eine Straße.", "Die Straße 你好."],
    ]
    assert {each.tag for each in page.iter()} == {"main", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.text_content().startswith("BLEU 30.12 on 1,014 sentences (nrefs:1|case:lc|tok:13a)")


def decoded(image: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(image)) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def test_tensorboard_reads_samples(reporter: Reporter, tmp_path: Path) -> None:
    for step in (250, 500):
        reporter.samples(make_sheet(step))
    # There while the run is in progress.
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


def test_tensorboard_shows_every_direction_by_name(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("valid", 250, {"nll": 1.5, "en-de/nll": 2.0, "de-en/nll": 1.0})
    for source, target in (("en", "de"), ("de", "en")):
        sheet = dataclasses.replace(make_sheet(250), source_language=source, target_language=target)
        reporter.samples(sheet)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"valid/nll", "valid/en-de/nll", "valid/de-en/nll"} <= set(board.Tags()["scalars"])
    assert {"samples/en-de/text_summary", "samples/de-en/text_summary"} <= set(board.Tags()["tensors"])
    assert sorted(board.Tags()["images"]) == [
        f"valid_attention/{direction}/sample_{number}" for direction in ("de-en", "en-de") for number in (1, 2)
    ]
