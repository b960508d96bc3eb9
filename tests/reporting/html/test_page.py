"""The content of the page, read by an HTML parser."""

import base64
import json
import os
import re
import sys
from pathlib import Path

import lxml.etree
import pytest

from dist_transformer.reporting.html.page import write_report
from dist_transformer.reporting.html.summary import duration
from tests.conftest import run_command
from tests.reporting.html.conftest import (
    RECORDS,
    SIGNATURE,
    Document,
    ReadPage,
    figures,
    rows,
    sample,
    section,
    train,
    words,
    write_run,
    write_samples,
    write_scores,
)


def test_sections_and_their_order(run_dir: Path, read_page: ReadPage) -> None:
    document = read_page(run_dir)
    titles = ["Key figures", "Curves", "Sample translations", "Cross-attention", "Scores", "Settings", "Environment"]
    assert [heading.text for heading in document.xpath("//h2")] == [*titles, "Checkpoints"]
    assert document.findtext(".//title") == "my run: training report"


def test_headline(run_dir: Path, read_page: ReadPage) -> None:
    (run_dir / "model").mkdir()
    described = {"corpus": "toy <1>", "source_language": "en", "target_language": "de", "synthetic": True}
    (run_dir / "model" / "config.json").write_text(json.dumps(described))
    document = read_page(run_dir)
    (header,) = document.xpath("//header")
    assert header.findtext(".//h1") == "my run"
    assert [words(p) for p in header.xpath("./div[@class='what']/p")] == [
        "Training report",
        "toy <1> · en → de · preset tiny · 2 + 2 layers, width 128, 4 heads, feed-forward 256",
        "finishedAll 80 steps are done.",
    ]
    assert words(document.xpath("//p[@class='warning']")[0]).startswith("Synthetic corpus")


def test_key_figures(run_dir: Path, read_page: ReadPage) -> None:
    assert figures(read_page(run_dir)) == {
        "Steps": ["80", "of 80"],
        "Epochs": ["2", "complete; 3·10⁶ target tokens"],
        "Training time": ["2 min 05 s", "without validation and saving"],
        "Target tokens/s": ["2,500", "median; 1,000 to 4,000 over 4 intervals"],
        "Fill": ["97.5 %", "of the token budgets is text"],
        "Skipped steps": ["1", "loss or gradient not finite"],
        "Training FLOPs": ["4.21·10¹²", "by the model's matrix products"],
        "Best validation": ["nll 1.500", "ppl 4.48, BLEU 20.0, step 60, best of 3 by nll"],
        "Batch": ["2,048", "target tokens at most, in 2 packs of 1,024"],
        "Ranks": ["2", "processes"],
        "ZeRO stage": ["1"],
        "Precision": ["bf16"],
    }


def test_key_figures_of_a_run_that_began(tmp_path: Path, read_page: ReadPage) -> None:
    found = figures(read_page(write_run(tmp_path, [train(20, nll=4.5, target_tokens_per_second=1000.0)])))
    assert found["Target tokens/s"] == ["1,000", "of 1 interval"]
    # What is not known has no cell.
    assert not {"Training time", "Fill", "Ranks"} & found.keys()
    assert found["Best validation"] == ["none", "no validation is recorded"]


DURATIONS = {0.0: "0.0 s", 59.94: "59.9 s", 59.96: "1 min 00 s", 125.0: "2 min 05 s", 3599.6: "1 h 00 min"}


@pytest.mark.parametrize(("seconds", "text"), {**DURATIONS, 11_220.0: "3 h 07 min", 4e6: "1,111 h 06 min"}.items())
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def curve_titles(document: Document) -> list[str]:
    return [caption.text for caption in section(document, "Curves").xpath(".//figcaption/b")]


def test_curves(run_dir: Path, read_page: ReadPage) -> None:
    document = read_page(run_dir)
    assert curve_titles(document) == ["Loss", "Validation BLEU", "Learning rate", "Gradient norm", "Throughput"]
    loss, bleu, *_, speed = section(document, "Curves").xpath(".//figure")
    assert [words(key) for key in loss.xpath(".//span[@class='legend']/span")] == [
        "training loss (label-smoothed)",
        "training nll",
        "validation nll",
    ]
    assert not bleu.xpath(".//span[@class='legend']")
    points = [title.text for title in loss.xpath(".//circle[@class='dot']/title")]
    assert points[:4] == [
        f"training loss (label-smoothed): {y:g} at step {x}" for x, y in ((20, 5.0), (40, 4.0), (60, 3.0), (80, 2.5))
    ]
    assert points[-3:] == [f"validation nll: {y:g} at step {x}" for x, y in ((40, 2.0), (60, 1.5), (80, 1.6))]
    assert words(loss.find("p")) == "ring: best validation, nll 1.500 at step 60"
    assert [title.text for title in bleu.xpath(".//circle/title")][-1] == "validation: 21.25 at step 80"
    assert "4,000" in [text.text for text in speed.xpath(".//text")]


def test_every_measure_of_a_validation_has_a_curve_and_the_best_has_its_figures(
    tmp_path: Path, read_page: ReadPage
) -> None:
    scores = {"bleu": 20.0, "chrf": 45.0, "ter": 60.25, "command": 0.81234}
    records = [train(step, nll=2.0) for step in (20, 40)]
    records += [{"kind": "valid", "step": step, "nll": 1.5, **scores} for step in (20, 40)]
    document = read_page(write_run(tmp_path, records, best_by="ter"))
    assert curve_titles(document) == [
        *("Loss", "Validation BLEU", "Validation chrF", "Validation TER", "Validation command")
    ]
    assert figures(document)["Best validation"] == [
        "nll 1.500",
        "BLEU 20.0, chrF 45.0, TER 60.2, command 0.8123, step 20, best of 2 by TER",
    ]


def test_the_samples_have_every_score_with_its_signature(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, RECORDS)
    write_samples(run, 40, 20.0, sample("a", "b", "c"), chrf=45.0, ter=60.25, signatures={"chrf": "c", "ter": "t"})
    text = words(section(read_page(run), "Sample translations").xpath("./p")[0])
    assert text == (
        f"Step 40: 1 of 500 validation sentences, which score 20.0 BLEU, 45.0 chrF, 60.2 TER. {SIGNATURE} · c · t"
    )


def test_a_long_run_has_a_close_look_at_its_second_half(tmp_path: Path, read_page: ReadPage) -> None:
    records = [train(step, nll=3.0, loss=4.0) for step in range(10, 201, 10)]
    document = read_page(write_run(tmp_path, records, max_steps=500))
    assert curve_titles(document) == ["Loss", "Loss, second half"]
    second = section(document, "Curves").xpath(".//figure")[1]
    assert second.xpath(".//circle/title")[0].text == "training loss (label-smoothed): 4 at step 100"
    assert words(section(document, "Curves")).endswith("No validation is recorded.")
    # Eight intervals in the second half are seen well enough in the whole.
    document = read_page(write_run(tmp_path, records[:15], max_steps=500))
    assert curve_titles(document) == ["Loss"]


def test_sample_translations(run_dir: Path, read_page: ReadPage) -> None:
    found = section(read_page(run_dir), "Sample translations")
    newest, first = found.xpath(".//table")
    assert rows(newest) == [
        ["Source", "Reference", "Hypothesis"],
        ["the dog sleeps", "der Hund schläft", "der Hund schläft gern"],
        ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "& &lt; ' \""],
    ]
    assert words(found.xpath("./p")[0]) == (
        f"Step 80: 2 of 500 validation sentences, which score 21.2 BLEU. {SIGNATURE}"
    )
    assert [words(p) for p in found.xpath("./details/p")] == ["Source: the dog sleeps", "Reference: der Hund schläft"]
    assert rows(first) == [
        ["Step", "BLEU", "Hypothesis"],
        ["40", "10.0", "der der"],
        ["80", "21.2", "der Hund schläft gern"],
    ]


def test_the_first_sentence_over_many_sheets(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, RECORDS)
    for step in range(1, 101):
        write_samples(run, step, 1.0, sample("a", "b", f"hypothesis {step}"))
    table = rows(section(read_page(run), "Sample translations").xpath(".//table")[1])
    assert [row[0] for row in table[1:]] == ["1", "12", "23", "34", "45", "56", "67", "78", "89", "100"]
    assert table[-1] == ["100", "1.0", "hypothesis 100"]


def test_the_newest_samples_are_shown_and_the_others_are_folded(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, RECORDS)
    write_samples(run, 80, 1.0, *(sample(f"source {number}", "b", "c", with_map=number < 3) for number in range(8)))
    document = read_page(run)
    found = section(document, "Sample translations")
    assert [len(found.xpath(path)) for path in ("./table//td", "./details/table//td")] == [3 * 4, 3 * 4]
    assert [words(title) for title in document.xpath("//section/details/summary")] == ["4 more", "2 more"]
    assert section(document, "Cross-attention").xpath("./details//img/@alt")[0] == "Cross-attention for: source 1"


def test_the_command_that_draws_every_head_is_named(run_dir: Path, read_page: ReadPage) -> None:
    (command,) = section(read_page(run_dir), "Cross-attention").xpath(".//code/text()")
    assert command.startswith("dist-transformer pictures --model RUN/model --src-text ")


def test_attention_maps_are_images_within_the_page(run_dir: Path, read_page: ReadPage) -> None:
    (image,) = section(read_page(run_dir), "Cross-attention").xpath(".//img")
    kind, _, content = image.get("src").partition(",")
    assert kind == "data:image/svg+xml;base64"
    picture = lxml.etree.fromstring(base64.b64decode(content))
    # It has no ground of its own, so that it can follow the page's light or dark.
    assert b"fill: #ffffff" not in lxml.etree.tostring(picture)
    texts = {"".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Decoder layer 1", "Decoder layer 2", "dog", "schläft", "gern"} <= texts
    assert image.get("alt") == "Cross-attention for: the dog sleeps"


def test_scores(run_dir: Path, read_page: ReadPage) -> None:
    """The headline is one of the others, and a score that the language does not have is null."""
    more = {"bleu_cased": 30.0, "bleu_lowercase": 25.0, "bleu_tokenized": None, "chrf_pp": 58.125}
    signatures = {"bleu_cased": SIGNATURE, "bleu_lowercase": "case:lc", "chrf": "c", "ter": "t"}
    write_scores(run_dir / "model" / "other.json", 30.0, **more, signatures=signatures)
    os.utime(run_dir / "bleu.json", (1, 1))
    found = section(read_page(run_dir), "Scores")
    files = {file.findtext("summary"): file for file in found.xpath("./details")}
    assert files.keys() == {"bleu.json", "model/other.json"}
    # The newest is open.
    assert [file.findtext("summary") for file in found.xpath("./details[@open]")] == ["model/other.json"]
    assert rows(files["bleu.json"].find("table")) == [
        ["Metric", "Score", "Signature"],
        ["BLEU", "23.46", SIGNATURE],
        ["chrF", "61.50", "nrefs:1|case:mixed|nc:6"],
        ["TER (lower is better)", "44.25", "nrefs:1|case:lc|tok:tercom"],
    ]
    assert rows(files["model/other.json"].find("table"))[1:] == [
        ["BLEU", "30.00", SIGNATURE],
        ["BLEU, case ignored", "25.00", "case:lc"],
        ["chrF", "61.50", "c"],
        ["chrF++", "58.12", ""],
        ["TER (lower is better)", "44.25", "t"],
    ]
    assert words(files["bleu.json"].find("p")) == (
        "1,000 sentences, 2 of them split, decoded in 12.3 s, on 2 rank(s), hypotheses in …/bleu.hypotheses.txt"
    )


def test_several_evaluations_are_rows_of_one_table(run_dir: Path, read_page: ReadPage) -> None:
    assert len(section(read_page(run_dir), "Scores").xpath(".//table")) == 1
    write_scores(run_dir / "best.json", 30.0, model="/home/someone/runs/1/best five", steps=[60, 20, 40])
    # A model that a program held has no folder.
    write_scores(run_dir / "held.json", 20.0, model=None, steps=[80])
    for time, file in enumerate(("bleu.json", "held.json")):
        os.utime(run_dir / file, (time, time))
    document = read_page(run_dir)
    found = section(document, "Scores")
    name = "best five (mean of 3, steps 20 to 60)"
    assert rows(found.xpath("./table")[0]) == [
        ["Model", "File", "Sentences", "BLEU", "chrF", "TER (lower is better)", "Signature of BLEU"],
        [name, "best.json", "1,000", "30.00", "61.50", "44.25", SIGNATURE],
        ["step 80", "held.json", "1,000", "20.00", "61.50", "44.25", SIGNATURE],
        ["", "bleu.json", "1,000", "23.46", "61.50", "44.25", SIGNATURE],
    ]
    assert words(found.xpath("./details/p")[0]).startswith(f"model: {name}, 1,000 sentences, ")
    assert f"best.json: {name}, 1,000 sentences" in words(document.xpath("//header/div[@class='bleu']")[0])


def test_settings_are_grouped_and_changes_marked(run_dir: Path, read_page: ReadPage) -> None:
    found = section(read_page(run_dir), "Settings")
    groups = {group.findtext("h3"): dict(rows(group)) for group in found.xpath(".//div[@class='group']")}
    # Settings that have their default are folded.
    assert {"seed", "dropout", "beta1"} <= {row.findtext("th").strip() for row in found.xpath(".//details//tr")}
    assert not found.xpath(".//details//tr[@class='changed']")
    assert list(groups) == ["run", "model", "batch", "optimizer", "deepspeed.zero_optimization"]
    changed = {row.findtext("th").strip() for row in found.xpath(".//tr[@class='changed']")}
    assert {"max_steps", "width", "packs_per_step", "schedule"} <= changed
    assert not {"data", "run_dir", "vocab_size", "seed", "dropout", "beta1", "data_sha256", "stage"} & changed
    assert groups["run"]["max_steps"] == "80default 100,000"
    assert groups["run"]["data"] == "…/toy"
    assert groups["model"]["tie_embeddings"] == "yes"
    assert groups["model"]["head_width"] == "none"
    assert groups["deepspeed.zero_optimization"] == {"stage": "1", "overlap_comm": "yes"}


def test_environment(run_dir: Path, read_page: ReadPage) -> None:
    first = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "torch": "2.11.0", "gpus": [], "hosts": 1}
    second = {**first, "step": 40, "torch": "2.13.0", "gpus": ["Fast <GPU>, 80 GiB"] * 8, "new": 1}
    (run_dir / "environment.json").write_text(json.dumps([first, second]))
    found = section(read_page(run_dir), "Environment")
    assert dict(rows(found.xpath(".//table")[0])) == {
        "PyTorch": "2.13.0",
        "GPUs of the host": "8 × Fast <GPU>, 80 GiB",
        "Hosts": "1",
        "new": "1",
    }
    assert [words(item) for item in found.xpath(".//li")] == [
        "first start after step 0 (2026-01-02T03:04:05+00:00)",
        "resumed after step 40 (2026-01-02T03:04:05+00:00): PyTorch 2.11.0 → 2.13.0, "
        "GPUs of the host none → 8 × Fast <GPU>, 80 GiB, new none → 1",
    ]


def test_settings_that_changed_at_a_start(run_dir: Path, read_page: ReadPage) -> None:
    """A start of a version that recorded no settings is compared with none."""
    when = {"time": "2026-01-02T03:04:05+00:00"}
    settings = [None, {"max_steps": 80, "seed": 1, "save_every": 5}, {"max_steps": 120, "seed": 1, "precision": "bf16"}]
    starts = [{"step": 40 * at, **when, **({"settings": each} if each else {})} for at, each in enumerate(settings)]
    (run_dir / "environment.json").write_text(json.dumps(starts))
    found = section(read_page(run_dir), "Environment")
    assert [words(item).partition(": ")[2] for item in found.xpath(".//li")] == [
        "",
        "nothing changed",
        "max_steps 80 → 120, save_every 5 → none, precision none → bf16",
    ]
    assert rows(found.xpath(".//table")[0]) == []


def test_checkpoints(run_dir: Path, read_page: ReadPage) -> None:
    found = section(read_page(run_dir), "Checkpoints")
    assert words(found.find("p")) == (
        "2 saves, the last at step 80: median 2.50 s, 1.00 to 4.00 s; training waited 1.5 s in all (1.2 % of the "
        "training time)."
    )
    assert [title.text for title in found.xpath(".//circle/title")] == ["save: 1 at step 40", "save: 4 at step 80"]


def test_what_is_missing_is_said(tmp_path: Path, read_page: ReadPage) -> None:
    document = read_page(write_run(tmp_path / "run", []))
    assert words(document.xpath("//header/div[@class='bleu']")[0]) == "No BLEU score in this folder."
    assert words(document.xpath("//header/div[@class='what']/p")[-1]) == (
        "no step recordedNo step of 80 is recorded yet."
    )
    (tmp_path / "run" / "config.json").unlink()
    document = read_page(tmp_path / "run")
    sentences = {
        "Key figures": "metrics.jsonl has no record yet: the first one comes with the first log line of training.",
        "Curves": "No training interval is recorded, so there is no curve to draw.",
        "Sample translations": "There are no sample translations in this folder: the run has not translated at a "
        "validation.",
        "Cross-attention": "Without sample translations there are no attention maps.",
        "Scores": "No score file in this folder: dist-transformer evaluate --json RUN/bleu.json writes one.",
        "Settings": "There is no config.json in this folder.",
        "Environment": "The run folder does not record the machine and the versions of training.",
        "Checkpoints": "No checkpoint is recorded.",
    }
    for title, sentence in sentences.items():
        assert words(section(document, title)) == f"{title} {sentence}"


def test_the_page_needs_nothing_else(run_dir: Path, read_page: ReadPage) -> None:
    document = read_page(run_dir)
    elements = [element for element in document.iter() if isinstance(element.tag, str)]
    assert not {"script", "link", "iframe", "object", "embed", "base", "a", "use", "image"} & {e.tag for e in elements}
    for element in elements:
        for name, value in element.attrib.items():
            assert not name.startswith("on"), (element.tag, name)
            assert name not in ("href", "xlink:href", "srcset", "style"), (element.tag, name)
            assert name != "src" or value.startswith("data:image/svg+xml;base64,")
    for style in document.xpath("//style"):
        assert not re.search(r"url\(|@import|@font-face|https?:", style.text)
    (policy,) = document.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    assert "default-src 'none'" in policy


def test_no_path_of_the_machine_is_shown(run_dir: Path) -> None:
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "someone" not in text
    assert str(run_dir.parent) not in text


def test_hostile_text_stays_text_everywhere(tmp_path: Path, read_page: ReadPage) -> None:
    evil = "</style></title><script>x</script><img src=x onerror=y>"
    run = write_run(tmp_path / evil.replace("/", "÷"), RECORDS, precision=evil, extra={evil: [evil]})
    write_samples(run, 80, 1.0, sample(evil, evil, evil, with_map=True))
    write_scores(run / "bleu.json", 1.0)
    values = json.loads((run / "bleu.json").read_text())
    (run / "bleu.json").write_text(json.dumps(values | {"signature": evil, "notes": [evil]}))
    (run / "environment.json").write_text(json.dumps([{"step": 0, "time": evil, evil: evil}]))
    document = read_page(run)
    assert not document.xpath("//script")
    assert len(document.xpath("//img")) == 1
    assert not document.xpath("//@onerror")
    for title in ("Key figures", "Sample translations", "Scores", "Settings", "Environment"):
        assert evil in words(section(document, title)), title


def test_where_it_is_written(run_dir: Path, tmp_path: Path) -> None:
    assert write_report(run_dir) == run_dir / "report.html"
    assert write_report(run_dir, tmp_path / "other.html") == tmp_path / "other.html"


@pytest.mark.system
def test_the_tool_prints_the_path(run_dir: Path) -> None:
    out = run_dir / "here.html"
    assert run_command(sys.executable, "-m", "dist_transformer", "report", run_dir, "--out", out) == f"{out}\n"
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
