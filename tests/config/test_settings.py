import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, read_json, to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.schema import flat_groups, values_of
from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.training.engine.schedule import learning_rate
from tests.conftest import ROOT, run_command

NEW_RUN = {"data": ("d",), "run_dir": Path("r")}
ABOVE_0, FROM_0, FRACTION = "it must be above 0", "it must be 0 or more", "it must be 0 or more, and below 1"

# Config, fields, wrong values, the remedy.
OUT_OF_RANGE: list[tuple[type, str, tuple[float, ...], str]] = [
    (ModelConfig, "width encoder_layers decoder_layers heads ffn_width max_positions head_width", (0, -2), ABOVE_0),
    (ModelConfig, "dropout attention_dropout ffn_dropout", (-0.1, 1.0, float("nan")), FRACTION),
    (BatchConfig, "max_target_tokens packs_per_step packs_per_micro_batch window_shards", (0,), ABOVE_0),
    (BatchConfig, "max_source_tokens max_sentences", (0,), ABOVE_0),
    (OptimizerConfig, "warmup_steps lr_scale peak_lr epsilon", (0, -1, float("nan")), ABOVE_0),
    (OptimizerConfig, "beta1 beta2 label_smoothing", (-0.5, 1), FRACTION),
    (OptimizerConfig, "weight_decay max_grad_norm min_lr rdrop_alpha", (-0.5, float("nan")), FROM_0),
    (TrainConfig, "max_steps save_every log_every keep_checkpoints keep_weights max_skipped_steps", (0,), ABOVE_0),
    (TrainConfig, "setup_timeout_minutes checkpoint_timeout_minutes evaluation_timeout_minutes", (0,), ABOVE_0),
    (TrainConfig, "validate_every patience seed timeout_minutes", (-1,), FROM_0),
    (TrainConfig, "ema_decay", (-0.1, 1.0), FRACTION),
]
TWO, WITHOUT_DROPOUT = {"data": ("a", "b")}, ModelConfig(dropout=0.0)
# Config, settings, the field that is named, its value as shown, part of the remedy.
REFUSED: list[tuple[type, dict[str, Any], str, str, str]] = [
    *[
        (kind, {name: value}, name, str(value), remedy)
        for kind, names, values, remedy in OUT_OF_RANGE
        for name in names.split()
        for value in values
    ],
    (ModelConfig, {"width": 100}, "width", "100", "multiple of heads (8), or set head_width"),
    (ModelConfig, {"width": 7, "heads": 1}, "width", "7", "even"),
    (
        ModelConfig,
        {"begin_with_pad": True, "begin_with_zeros": True},
        "begin_with_pad",
        "True",
        "begin_with_zeros is set",
    ),
    (ModelConfig, {"begin_with_zeros": True, "begin_with_end": True}, "begin_with_zeros", "True", "end is set"),
    (ModelConfig, {"positions": "learned", "first_position": 2}, "positions", "'learned'", "leave first_position out"),
    (ModelConfig, {"target_vocab_size": 5}, "tie_embeddings", "'all'", "two vocabularies cannot share all three"),
    (ModelConfig, {"attention": "alibi"}, "attention", "'alibi'", "or choose one of softmax"),
    (ModelConfig, {"positions": "rotary"}, "positions", "'rotary'", "one of sinusoidal, sinusoidal_t2t, learned"),
    (BatchConfig, {"packs_per_micro_batch": 65}, "packs_per_micro_batch", "65", "above packs_per_step (64)"),
    (OptimizerConfig, {"schedule": "cosin"}, "schedule", "'cosin'", "did you mean cosine, or is --import"),
    (OptimizerConfig, {"schedule": "cosine", "min_lr": 2e-3}, "min_lr", "0.002", "above peak_lr (0.001)"),
    (
        *(TrainConfig, {"model": WITHOUT_DROPOUT, "optimizer": OptimizerConfig(rdrop_alpha=5.0)}),
        *("optimizer.rdrop_alpha", "5.0", "without dropout both passes are equal"),
    ),
    (TrainConfig, {**TWO, "data_weights": (1.0, 0.0)}, "data_weights", "(1.0, 0.0)", "pass one weight"),
    *[
        (TrainConfig, {"profile": words, "max_steps": 102}, "profile", repr(words), "it must be STEP:COUNT, such")
        for words in ("100", "0:3", "3:0", "a:b", "100:4", "1:2:3")
    ],
    (TrainConfig, {"patience": 3, "validate_every": 0}, "patience", "3", "validate_every above 0"),
]


@pytest.mark.parametrize(("kind", "settings", "field", "value", "remedy"), REFUSED)
def test_a_wrong_value_is_refused_with_field_value_and_remedy(
    kind: type, settings: dict[str, Any], field: str, value: str, remedy: str
) -> None:
    with pytest.raises(UserError) as refused:
        TrainConfig.of(**{**NEW_RUN, **settings}) if kind is TrainConfig else kind(**settings)
    message = str(refused.value)
    assert message.startswith(f"{field} is {value}: ")
    assert remedy in message.partition(": ")[2]


def test_every_field_that_holds_a_number_is_refused_when_negative() -> None:
    """A new field without validation fails here."""
    for kind in (ModelConfig, BatchConfig, OptimizerConfig):
        for field in dataclasses.fields(kind):
            if field.type in (int, float, int | None):
                with pytest.raises(UserError, match=f"^{field.name} is -1"):
                    kind(**{field.name: -1})
    for kind in (TrainConfig, *flat_groups(TrainConfig).values()):
        for field in dataclasses.fields(kind):
            if field.type in (int, float, int | None):
                with pytest.raises(UserError, match=f"^{field.name} is -1"):
                    TrainConfig.of(**NEW_RUN, **{field.name: -1})


def test_settings_of_groups_go_by_the_names_of_their_flags() -> None:
    config = TrainConfig.of(**NEW_RUN, save_every=7, patience=2, max_steps=9)
    assert (config.checkpoints.save_every, config.validation.patience, config.max_steps) == (7, 2, 9)
    changed = config.changed(keep_best=1, seed=3)
    assert (changed.checkpoints.keep_best, changed.checkpoints.save_every, changed.seed) == (1, 7, 3)
    assert config.seed == 1
    with pytest.raises(TypeError, match="save_evry"):
        config.changed(save_evry=1)
    names = [field.name for kind in flat_groups(TrainConfig).values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names))
    assert not set(names) & {field.name for field in dataclasses.fields(TrainConfig)}


def test_groups_lie_flat_in_files() -> None:
    plain = to_plain(PRESETS["tiny"])
    assert (plain["save_every"], plain["validate_every"], plain["timeout_minutes"]) == (100, 200, 0.0)
    assert not flat_groups(TrainConfig).keys() & plain.keys()


def test_the_steps_of_a_profile_may_end_with_the_training() -> None:
    config = TrainConfig.of(data=("d",), run_dir=Path("r"), max_steps=102, profile="100:3")
    assert config.profiled_steps == (100, 3)
    assert TrainConfig.of(data=("d",), run_dir=Path("r")).profiled_steps is None


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().width = 8  # type: ignore[misc]


def changes_of_base(preset: str) -> dict[str, Any]:
    base = values_of(PRESETS["base"])
    return {name: value for name, value in values_of(PRESETS[preset]).items() if value != base[name]}


def test_base_is_the_papers() -> None:
    config = PRESETS["base"]
    model, optimizer = config.model, config.optimizer
    assert (model.encoder_layers, model.decoder_layers) == (6, 6)
    assert (model.width, model.ffn_width, model.heads) == (512, 2048, 8)
    assert (model.dropout, model.attention_dropout, model.ffn_dropout) == (0.1, 0.0, 0.0)
    assert (model.norm, model.activation, model.positions) == ("post", "relu", "sinusoidal")
    assert model.tie_embeddings == "all"
    assert config.max_steps == 100_000
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.lr_scale) == ("noam", 4000, 1.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert optimizer.label_smoothing == 0.1
    assert (optimizer.max_grad_norm, optimizer.weight_decay) == (0.0, 0.0)
    # About 25k target tokens a step.
    assert config.batch.packs_per_step * config.batch.max_target_tokens == pytest.approx(25_000, rel=0.01)
    # The paper averages the last 20.
    assert config.checkpoints.keep_weights == 20


BIG = {"model.width": 1024, "model.heads": 16, "model.ffn_width": 4096, "model.dropout": 0.3}


def test_big_is_the_papers_and_its_large_batch_that_of_ott_et_al() -> None:
    assert changes_of_base("big") == {**BIG, "max_steps": 300_000}
    # 3584 tokens on 8 GPUs, accumulated 16 times.
    batch = {"batch.max_target_tokens": 3584, "batch.packs_per_step": 128, "optimizer.schedule": "inverse_sqrt"}
    assert changes_of_base("big_large_batch") == {**BIG, **batch, "max_steps": 20_000, "save_every": 500}
    optimizer = PRESETS["big_large_batch"].optimizer
    assert (optimizer.peak_lr, optimizer.warmup_steps) == (1e-3, 4000)


def test_multi30k_is_transformer_tiny() -> None:
    network = {"model.width": 128, "model.ffn_width": 256, "model.heads": 4, "model.dropout": 0.3}
    layers = {"model.encoder_layers": 4, "model.decoder_layers": 4}
    batch = {"batch.max_target_tokens": 4096, "batch.packs_per_step": 2}
    rate = {"optimizer.schedule": "inverse_sqrt", "optimizer.peak_lr": 5e-3, "optimizer.warmup_steps": 2000}
    steps = {"max_steps": 8000, "save_every": 250, "validate_every": 250, "patience": 10}
    assert changes_of_base("multi30k") == {**network, **layers, **batch, **rate, **steps}


def test_ted_tutorial_is_the_tutorials_recipe_with_a_peak_that_trains() -> None:
    config = PRESETS["ted_tutorial"]
    rate = {"optimizer.schedule": "cosine", "optimizer.peak_lr": 2e-4, "optimizer.min_lr": 1e-5}
    rate |= {"optimizer.warmup_steps": 1000, "optimizer.weight_decay": 0.01}
    batch = {"batch.max_target_tokens": 4031, "batch.packs_per_step": 8}
    assert changes_of_base("ted_tutorial") == {**rate, **batch, "max_steps": 10_000, "validate_every": 100}
    rates = {step: learning_rate(step, config) for step in (1, 1000, 10_000)}
    assert rates == pytest.approx({1: 2e-7, 1000: 2e-4, 10_000: 1e-5})
    runs = read_json(ROOT / "results/quality/ted.json")["figures"]["runs"].values()
    learned = {run["peak_lr"] for run in runs if run["width"] == 512 and run["dev_bleu"] > 1}
    assert learned == {config.optimizer.peak_lr}


def test_a_step_of_ted_tutorial_is_2048_captions() -> None:
    """256 pairs times accumulation 8, at the mean length of a target side in the captions that were measured."""
    captions = read_json(ROOT / "results/quality/ted.json")["figures"]["captions"]
    batch = PRESETS["ted_tutorial"].batch
    assert batch.packs_per_step == 8
    assert batch.max_target_tokens == round(256 * captions["target_tokens"] / captions["pairs"])


@pytest.mark.slow
def test_the_captions_have_the_length_that_ted_tutorial_is_made_for(corpora: Path, tmp_path: Path) -> None:
    """Prepared as docs/ted.md prepares the talks."""
    captions = corpora / "captions_en_zh"
    texts = ["--src", captions / "train.en", "--tgt", captions / "train.zh"]
    texts += ["--valid-src", captions / "valid.en", "--valid-tgt", captions / "valid.zh"]
    flags = ["--vocab-size", 10_000, "--normalization", "nfc", "--max-tokens", 128]
    run_command(sys.executable, "tools/prepare_data.py", *texts, *flags, "--out", tmp_path / "data")
    index = DataFolder.open(tmp_path / "data").index
    measured = read_json(ROOT / "results/quality/ted.json")["figures"]["captions"]
    assert (index.train.pairs, index.train.target_tokens) == (measured["pairs"], measured["target_tokens"])
    assert index.vocab_size == measured["vocabulary"] == 10_000


def test_a_step_of_so_many_tokens_is_the_nearest_number_of_packs() -> None:
    for tokens, packs in ((25_000, 64), (392, 1), (587, 1), (589, 2), (4096 * 8 * 4, 334)):
        batch = BatchConfig(target_tokens_per_step=tokens)
        assert (batch.packs_per_step, batch.target_tokens_per_step) == (packs, None)
    # It is one of two ways to state the size, so it is in no file, and another pack keeps the packs.
    assert to_plain(batch) == to_plain(BatchConfig(packs_per_step=334))
    assert dataclasses.replace(batch, max_target_tokens=100).packs_per_step == 334
    with pytest.raises(
        UserError, match=r"^target_tokens_per_step is 391: it cannot be below a pack \(392\): lower max"
    ):
        BatchConfig(target_tokens_per_step=391)


def test_presets_leave_the_vocabulary_to_the_data() -> None:
    assert {config.model.vocab_size for config in PRESETS.values()} == {0}


@pytest.mark.parametrize(
    ("packs", "packs_per_micro_batch", "worlds"),
    [
        (8, 1, {1: 8, 2: 4, 3: 3, 4: 2, 8: 1}),
        (8, 2, {1: 4, 2: 2, 3: 2, 4: 1, 8: 1}),
        (8, 3, {1: 3, 2: 2, 3: 1, 4: 1, 8: 1}),
        (8, 8, {1: 1, 2: 1, 3: 1, 4: 1, 8: 1}),
        (9, 1, {1: 9, 2: 5, 3: 3, 4: 3, 8: 2}),
        (1, 1, {1: 1}),
    ],
)
def test_accumulation(packs: int, packs_per_micro_batch: int, worlds: dict[int, int]) -> None:
    batch = BatchConfig(packs_per_step=packs, packs_per_micro_batch=packs_per_micro_batch)
    assert {world: batch.accumulation_steps(world) for world in worlds} == worlds


@pytest.mark.parametrize(
    ("packs", "tokens", "worlds"),
    [
        # An eighth of 64, up to eight ranks; then a rank's share.
        (64, 392, {1: 8, 2: 8, 8: 8, 16: 4, 64: 1}),
        # 4096 tokens are enough.
        (128, 392, {1: 10}),
        (128, 3584, {1: 1}),
        (2, 1024, {1: 1, 2: 1}),
        (16, 5000, {1: 1}),
    ],
)
def test_packs_at_once_on_a_cpu(packs: int, tokens: int, worlds: dict[int, int]) -> None:
    batch = BatchConfig(packs_per_step=packs, max_target_tokens=tokens)
    assert {world: batch.packs_on_a_cpu(world) for world in worlds} == worlds


def test_packs_of_two_passes_fill_a_cpu_sooner() -> None:
    batch = BatchConfig(packs_per_step=128, max_target_tokens=392)
    assert batch.packs_on_a_cpu(1, passes=OptimizerConfig(rdrop_alpha=5.0).passes) == 5


def test_rdrop_takes_any_kind_of_dropout() -> None:
    for kind in ("dropout", "attention_dropout", "ffn_dropout"):
        model = dataclasses.replace(ModelConfig(dropout=0.0), **{kind: 0.1})
        TrainConfig.of(**NEW_RUN, model=model, optimizer=OptimizerConfig(rdrop_alpha=5.0))


def test_a_world_larger_than_the_step_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        UserError, match=r"packs_per_step is 2 but 3 processes.*raise --batch\.packs-per-step.*start fewer"
    ):
        BatchConfig(packs_per_step=2).accumulation_steps(3)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_config_comes_back_from_json(preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset], deepspeed_config=Path("ds/zero2.json"))
    for original in (PRESETS[preset], config):
        plain = json.loads(json.dumps(to_plain(original)))
        assert from_plain(TrainConfig, plain, "config.json") == original
        assert plain["model"]["width"] == original.model.width


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^run/config\.json has the unknown setting 'widht': remove it"):
        from_plain(ModelConfig, {"widht": 3}, "run/config.json")
    plain = to_plain(PRESETS["tiny"])
    plain["optimizer"]["nesterov"] = 0.9
    with pytest.raises(UserError, match=r"^run/config\.json has the unknown setting 'optimizer\.nesterov': remove it"):
        from_plain(TrainConfig, plain, "run/config.json")


def test_a_missing_setting_is_refused_by_name() -> None:
    plain = to_plain(PRESETS["tiny"])
    del plain["run_dir"]
    with pytest.raises(UserError, match=r"^config\.json is incomplete \(.*run_dir.*\): write the file again"):
        from_plain(TrainConfig, plain, "config.json")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model", "width", "512"),
        ("model", "norm", "sandwich"),
        ("optimizer", "schedule", "cosin"),
        ("optimizer", "peak_lr", "1e-3"),
        ("batch", "packs_per_step", True),
        (None, "data", 3),
        (None, "model", "base"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(section: str | None, name: str, value: object) -> None:
    """A hand-edited config.json: the message names the file and the field, and no traceback is shown."""
    plain = to_plain(PRESETS["tiny"])
    (plain[section] if section else plain)[name] = value
    field = f"{section}.{name}" if section else name
    with pytest.raises(UserError, match=rf"^({field} in config\.json must|in config\.json, {field} is) "):
        from_plain(TrainConfig, plain, "config.json")


def test_a_newer_setting_is_written_only_where_it_is_set() -> None:
    """An older file, which lacks it, is read, and equals what a run of the same settings writes now."""
    assert "min_lr" not in to_plain(OptimizerConfig())
    assert "attention" not in to_plain(ModelConfig())
    assert from_plain(ModelConfig, {"width": 16}, "config.json") == ModelConfig(width=16, attention="softmax")
    assert from_plain(OptimizerConfig, {"warmup_steps": 7}, "config.json").min_lr == 0.0
    changed = OptimizerConfig(min_lr=1e-5)
    assert to_plain(changed)["min_lr"] == 1e-5
    assert from_plain(OptimizerConfig, to_plain(changed), "config.json") == changed


def test_a_whole_number_is_a_valid_fraction() -> None:
    assert from_plain(ModelConfig, {"dropout": 0}, "config.json").dropout == 0


@pytest.mark.parametrize(
    ("config", "name", "written"),
    [
        (ModelConfig(tie_embeddings="all"), "tie_embeddings", True),
        (ModelConfig(tie_embeddings="target"), "tie_embeddings", "target"),
        (ModelConfig(tie_embeddings="none"), "tie_embeddings", False),
        (PRESETS["tiny"].changed(compile="auto"), "compile", "auto"),
        (PRESETS["tiny"].changed(compile="on"), "compile", True),
        (PRESETS["tiny"].changed(compile="off"), "compile", False),
    ],
)
def test_what_was_a_switch_is_written_as_it_was(config: Any, name: str, written: object) -> None:
    """So that older runs keep their settings and their identity."""
    plain = to_plain(config)
    assert plain[name] == written
    assert "target_vocab_size" not in plain
    assert from_plain(type(config), plain, "config.json") == config
    assert from_plain(type(config), {**plain, name: getattr(config, name)}, "config.json") == config


def test_two_vocabularies_untie_the_sources_alone() -> None:
    shapes = {}
    for ties in ("all", "target", "none"):
        model = ModelConfig(tie_embeddings=ties).for_vocabularies(30, 20)  # type: ignore[arg-type]
        shapes[ties] = (model.tie_embeddings, model.vocab_sizes, model.output_size)
    assert shapes == {
        "all": ("target", (30, 20), 20),
        "target": ("target", (30, 20), 20),
        "none": ("none", (30, 20), 20),
    }
    joint = ModelConfig().for_vocabularies(30, 0)
    assert (joint.tie_embeddings, joint.output_size) == ("all", 30)
