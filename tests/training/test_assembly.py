"""Plans that are hardly meant are named before training starts; those of the presets on their corpora are not."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.warm_start import read_initial_weights
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training import assembly, introduction, logbook
from dist_transformer.training.assembly import assemble
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.fault_tolerance.watchdog import Watchdog
from dist_transformer.training.introduction import (
    cautions,
    introduce,
    note_on_nodes,
    planned_epochs,
    rate_cautions,
    tag_cautions,
)
from tests.small_model import restate


def corpus(pairs: int, source_tokens: int, target_tokens: int) -> Any:
    train = SimpleNamespace(pairs=pairs, source_tokens=source_tokens, target_tokens=target_tokens)
    return SimpleNamespace(index=SimpleNamespace(train=train))


def epochs_of(config: TrainConfig, *corpora: Any, source: int = 1000, target: int = 1000, pairs: int = 100) -> float:
    budgets = Budgets(max_source_tokens=source, max_target_tokens=target, max_sentences=pairs)
    return planned_epochs(config, SimpleNamespace(budgets=budgets, folders=corpora))  # type: ignore[arg-type]


def test_epochs_by_hand() -> None:
    """100 steps of 4 packs."""
    config = dataclasses.replace(PRESETS["tiny"], max_steps=100)
    config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, packs_per_step=4))
    # 20 packs are 5 steps; 17 are as many, because the last one is not filled from the next epoch.
    assert epochs_of(config, corpus(1000, 20_000, 10_000)) == 20
    assert epochs_of(config, corpus(1000, 10_000, 16_500)) == 20
    # What a pack has no room for: pairs. 3,000 of them are 30 packs, 8 steps.
    assert epochs_of(config, corpus(3000, 10_000, 10_000)) == 12.5
    # Less than a pack is an epoch a step.
    assert epochs_of(config, corpus(3, 30, 30)) == 100
    # A mixture fills every step: 20 + 1 packs, 400 of which are trained on.
    assert epochs_of(config, corpus(1000, 20_000, 10_000), corpus(3, 30, 30)) == 400 / 21


def test_epochs_are_those_that_the_plan_counts(toy_data: DataFolder) -> None:
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),))
    data = open_training_data(config.corpora, config.batch, seed=1)
    steps = data.plan.steps(data.plan.start(), config.batch.packs_per_step)
    in_an_epoch = next(number for number, step in enumerate(steps) if step.epoch == 1)
    assert planned_epochs(config, data) == pytest.approx(1000 / in_an_epoch, rel=0.05)


def test_fewer_nodes_that_are_as_fast_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`big` has 64 packs of 392 tokens: one per GPU on 8 nodes, where the host is the limit."""
    preset = PRESETS["big"]
    config = dataclasses.replace(preset, model=dataclasses.replace(preset.model, vocab_size=37_000), precision="bf16")

    def note(gpu: str, *, nodes: int, device: str = "cuda:0") -> str | None:
        for module in (introduction, logbook):
            monkeypatch.setattr(module, "describe_environment", lambda: {"gpus": [gpu]})
        world = World(size=8 * nodes, local_size=8)
        return note_on_nodes(config, load_ds_config(None), 392, world, torch.device(device))

    assert note("NVIDIA H100 80GB HBM3, 79 GiB", nodes=8) == (
        "1 node(s) would have 104% of the speed of these 8, by the model of dist-transformer plan: start on fewer "
        "nodes, or raise --batch.packs-per-step"
    )
    assert note("NVIDIA H100 80GB HBM3, 79 GiB", nodes=1) is None
    assert note("a GPU in no table, 1 GiB", nodes=8) is None
    # It has no bf16.
    assert note("Tesla V100-SXM2-32GB, 31 GiB", nodes=8) is None
    assert note("NVIDIA H100 80GB HBM3, 79 GiB", nodes=8, device="cpu") is None


def test_thousands_of_epochs_are_absurd() -> None:
    config = dataclasses.replace(PRESETS["big"], max_steps=300_000)
    (caution,) = cautions(config, epochs=34_851.4, target_tokens=215_959)
    # 300,000 · 100 / 34,851.4
    assert caution == (
        "--max-steps 300000 means about 34,851 epochs of 215,959 target tokens, which the model would memorize: "
        "lower --max-steps (861 is about 100 epochs), or use a smaller preset"
    )
    assert list(cautions(config, epochs=1000.0, target_tokens=7_500_000)) == []
    assert list(cautions(config, epochs=None, target_tokens=None)) == []
    # A run with patience ends by itself.
    assert list(cautions(PRESETS["tiny"].changed(patience=5), epochs=1e6, target_tokens=100)) == []


def test_what_cannot_be_frozen_is_refused_before_anything_is_written(toy_data: DataFolder, tmp_path: Path) -> None:
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),), run_dir=tmp_path / "run", freeze=("nothing",))
    with (
        process_group(World(), single=True) as device,
        pytest.raises(UserError, match=r"--freeze nothing matches no part of the model"),
    ):
        assemble(config, World(), device)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_while_the_engine_is_built_is_seen_by_the_others(
    toy_data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none is left")

    published: list[Path] = []
    monkeypatch.setattr(Watchdog, "publish_in", lambda _, run_dir: published.append(run_dir))
    monkeypatch.setattr(assembly, "Engine", no_memory)
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),), run_dir=tmp_path / "run")
    with process_group(World(), single=True) as device, pytest.raises(torch.OutOfMemoryError):
        assemble(config, World(), device)
    assert published == [tmp_path / "run"]


def test_a_warm_up_that_takes_the_whole_run() -> None:
    config = dataclasses.replace(PRESETS["base"], max_steps=4001)
    assert list(cautions(config, epochs=3.0, target_tokens=100)) == []
    config = dataclasses.replace(config, max_steps=4000)
    assert list(cautions(config, epochs=3.0, target_tokens=100)) == [
        "--optimizer.warmup-steps 4000 is not below --max-steps 4000, so the learning rate would rise until the end: "
        "lower --optimizer.warmup-steps, or raise --max-steps"
    ]


# Pairs and target tokens: the demo's 25,000 pairs, Multi30k, 200,000 captions or speeches, WMT14 English-German.
DEMO, MULTI30K, TALKS, WMT14 = (25_000, 484_322), (29_000, 406_000), (200_000, 4_000_000), (4_500_000, 130_000_000)
INTENDED = {
    "tiny": DEMO,
    "multi30k": MULTI30K,
    "finetune": TALKS,
    "ted_en_zh": TALKS,
    "ted_tutorial": TALKS,
    "base": WMT14,
    "student": WMT14,
    "big": WMT14,
    "big_large_batch": WMT14,
}


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_is_absurd_on_its_corpus(name: str) -> None:
    pairs, tokens = INTENDED[name]
    # With patience or without.
    config = PRESETS[name].changed(patience=0)
    budget = config.batch.max_target_tokens
    epochs = epochs_of(config, corpus(pairs, tokens, tokens), source=budget, target=budget, pairs=budget // 8)
    assert 1 < epochs < 200
    assert list(cautions(config, epochs=epochs, target_tokens=tokens)) == []


def introduced(
    data: DataFolder, *steps: int, device: str = "cpu", compilation: Any = (False, "no GPU"), **changes: Any
) -> list[str]:
    """Begin trainings of so many steps, with a note; return the lines that are said."""
    config = PRESETS["tiny"].changed(data=(str(data.path),), **changes)
    loaded = open_training_data(config.corpora, config.batch, seed=1)
    found = {"compilation": compilation, "graph_problem": "no GPU"}
    engine: Any = SimpleNamespace(parameters=1234, stage=1, device=torch.device(device), **found)
    said: list[str] = []
    reporter: Any = SimpleNamespace(say=said.append)
    for count in steps:
        introduce(config.changed(max_steps=count), World(), loaded, engine, reporter, ["a note"])
    return "\n".join(said).splitlines()


def test_training_begins_with_its_epochs_and_the_warnings(
    toy_data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 pairs of 75,600 target tokens: 36 steps of 2,048 and one that is not full."""
    # Other work on this machine adds a warning.
    monkeypatch.setattr(introduction, "load_of_machine", lambda: None)
    lines = introduced(toy_data, 100, 100_000)
    assert lines[1] == (
        "1,234 parameters; a step has about 54 sentences and 2,043 target tokens (2 packs, at most 2,048: "
        "--batch.target-tokens-per-step 2048)"
    )
    assert lines[2] == "100 steps, about 2.7 epochs of 75,600 target tokens in about 37 steps"
    assert lines[3].endswith("; in a step each computes 2 x about 27 sentences (1 pack(s) at a time)")
    assert lines[4:6] == [
        "a note",
        "warning: --optimizer.warmup-steps 200 is not below --max-steps 100, so the learning rate would rise until the "
        "end: lower --optimizer.warmup-steps, or raise --max-steps",
    ]
    assert lines[8] == "100,000 steps, about 2,703 epochs of 75,600 target tokens in about 37 steps"
    assert lines[-1].startswith("warning: --max-steps 100000 means about 2,703 epochs of 75,600 target tokens, which")
    assert len([line for line in lines if line.startswith("warning")]) == 2


@pytest.mark.parametrize(
    ("device", "given", "compilation", "said"),
    [
        ("cuda", "auto", (True, "25,088 target tokens at once"), "bf16, compiled (25,088 target tokens at once); in"),
        ("cuda", "off", (False, "--compile off"), "bf16, not compiled (--compile off); in a step"),
        ("cpu", "on", (False, "no GPU"), "bf16, not compiled (no GPU); in a step"),
    ],
)
def test_training_begins_with_the_choice_of_compilation(
    toy_data: DataFolder, device: str, given: str, compilation: tuple[bool, str], said: str
) -> None:
    assert said in introduced(toy_data, 100, device=device, compilation=compilation, compile=given)[3]


def test_graphs_that_a_run_cannot_have_are_one_line(toy_data: DataFolder) -> None:
    assert introduced(toy_data, 100, cuda_graphs="yes")[4] == "no CUDA graphs are used (no GPU)"


def test_the_peak_is_that_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Tesla T4, 15 GiB", "NVIDIA H200, 140 GiB"]
    monkeypatch.setattr(logbook, "describe_environment", lambda: {"gpus": names})
    config = PRESETS["tiny"].changed(precision="bf16")

    def peak(gpu: int, world: World) -> float | None:
        return logbook.peak_flops_of(config, world, torch.device("cuda", gpu))

    # NVIDIA's datasheet: 989 TFLOP/s in bf16.
    assert peak(1, World(rank=1, size=4)) == 4 * 989e12
    assert peak(0, World()) is None
    assert logbook.peak_flops_of(config, World(), torch.device("cpu")) is None


def checkpoint(updates: int, config: TrainConfig | None) -> Any:
    described = None if config is None else {**to_plain(config), "data_sha256": ["0"]}
    return SimpleNamespace(path=Path("step"), state={"updates": updates}, settings=lambda: described)


def test_a_finished_cosine_that_continues_is_named_with_both_rates() -> None:
    cosine = OptimizerConfig(schedule="cosine", peak_lr=1e-3, min_lr=1e-5, warmup_steps=100)
    before = dataclasses.replace(PRESETS["tiny"], optimizer=cosine, max_steps=1100)
    twice = dataclasses.replace(before, max_steps=2100)
    (said,) = rate_cautions(twice, checkpoint(1100, before))
    # Half of the way down, after update 1,101: a little less than 1e-5 + 0.99e-3 / 2.
    assert said.startswith(
        "warning: the changed settings continue at a learning rate of 0.000504, the old ones at 1e-05"
    )
    slower = dataclasses.replace(cosine, peak_lr=5e-4)
    (said,) = rate_cautions(dataclasses.replace(before, optimizer=slower), checkpoint(300, before))
    assert "0.000453" in said
    assert "0.000905" in said
    for config, described, updates in (
        (before, before, 900),
        (dataclasses.replace(before, max_steps=1101), before, 900),
        (PRESETS["base"], dataclasses.replace(PRESETS["base"], max_steps=9), 9),
        # Old versions do not state the settings.
        (twice, None, 1100),
    ):
        assert list(rate_cautions(config, checkpoint(updates, described))) == []


def test_data_without_the_tags_of_its_model_is_named(
    toy_data: DataFolder, model_folder: Path, toy_tokenizer: Tokenizer, random_model: Transformer, tmp_path: Path
) -> None:
    data: Any = SimpleNamespace(folders=[toy_data])

    def said(model: Path) -> list[str]:
        config = TrainConfig.of(data=("mine",), run_dir=tmp_path / "run", init_from=model)
        origin = read_initial_weights(model, random_model.config, toy_tokenizer, vocabulary="same")
        return list(tag_cautions(config, data, origin))

    assert said(model_folder) == []
    tagged = Path(shutil.copytree(model_folder, tmp_path / "tagged"))
    restate(tagged, directions=[{"source_language": "en", "target_language": "deu", "tags": [">>deu<<"]}])
    assert said(tagged) == [
        f"warning: mine (en-de) lacks the tags of --init-from {tagged} (en-deu >>deu<<), so its sources differ from "
        "those that the model knows: prepare the text with --src-tag '>>deu<<', unless that is meant"
    ]
