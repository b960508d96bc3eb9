"""The command line of a training: what wins over what, and the flags of other toolkits."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.flags import parse_training, refuse_without_effect
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig, TrainConfig

HERE = ["--data", "d", "--run-dir", "r"]
NEW_RUN: dict[str, Any] = {"data": ("d",), "run_dir": Path("r")}


def parsed(*words: object) -> TrainConfig:
    return parse_training([str(word) for word in words])[0]


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_defaults(preset: str) -> None:
    more, values = ([], {}) if preset != "finetune" else (["--init-from", "gone"], {"init_from": Path("gone")})
    config = parsed("--preset", preset, *HERE, *more)
    assert config == PRESETS[preset].changed(**NEW_RUN, **values)


def test_base_is_the_preset_when_none_is_given() -> None:
    assert parsed(*HERE) == parsed("--preset=base", *HERE)


def test_settings_have_flags_of_their_names() -> None:
    """Groups that lie flat, and nested ones; also before the preset that they override."""
    flags = (
        "--max-steps 7 --save-every 3 --patience 4 --precision fp32 --resume never --deepspeed_config zero2.json "
        "--model.width 64 --model.norm pre --model.tie-embeddings none --batch.packs-per-step 4 "
        "--batch.max_source_tokens 99 --optimizer.schedule cosine --optimizer.peak-lr 2e-3"
    )
    plain = {"max_steps": 7, "save_every": 3, "patience": 4, "precision": "fp32", "resume": "never"}
    tiny = PRESETS["tiny"].changed(**NEW_RUN, **plain)
    assert parsed(*flags.split(), "--preset", "tiny", *HERE) == dataclasses.replace(
        tiny,
        deepspeed_config=Path("zero2.json"),
        model=dataclasses.replace(tiny.model, width=64, norm="pre", tie_embeddings="none"),
        batch=dataclasses.replace(tiny.batch, packs_per_step=4, max_source_tokens=99),
        optimizer=dataclasses.replace(tiny.optimizer, schedule="cosine", peak_lr=2e-3),
    )


def test_a_variant_changes_the_preset_and_a_flag_the_variant() -> None:
    config = parsed("--preset", "multi30k", "--variant", "C5", *HERE)
    assert (config.model.width, config.model.attention_head_width) == (256, 64)
    assert config.batch == PRESETS["multi30k"].batch
    config = parsed("--variant=big", *HERE, "--max-steps", 9)
    assert (config.model, config.max_steps) == (PRESETS["big"].model, 9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset tiny --run-dir r", r"^pass --data: "),
        ("--preset tiny --data d", r"^pass --run-dir: "),
        ("--preset finetune", r"^--preset finetune trains a model further: pass it with --init-from"),
        ("--preset huge", r"^--preset huge is unknown: choose one of tiny, multi30k, .*big_large_batch"),
        ("--variant C8", r"^--variant C8 is unknown: choose one of base, A1, .*C7, D1, .*E, big$"),
        ("--model.norm sandwich", r"^--model.norm sandwich is unknown: choose one of post, pre"),
        # A switch until 0.1.0.
        ("--compile", r"^--compile needs a value: choose one of auto, on, off"),
        ("--preset bsae", r"^--preset bsae is unknown: did you mean base\?"),
        ("--xyz 3", r"^--xyz is not a flag here: see "),
        # An abbreviation of --preset is no way to set it.
        ("--pres tiny", r"^--pres is not a flag here: did you mean --preset\?"),
        ("--width 3 --model.head 2", r"for --width use --model.width; for --model.head use --model.heads"),
        ("-max-steps 3", r"^-max-steps is not a flag here: did you mean --max-steps\?"),
        ("--max-steps many", r"^--max-steps is 'many': it must be a whole number$"),
        ("--max-steps 3 --max_steps 4", r"^--max-steps appears twice"),
        ("--batch.packs-per-step 0", r"^--batch.packs-per-step is 0: it must be above 0$"),
        ("--optimizer.schedule linear", r"^--optimizer.schedule is 'linear': pass the file that .* noam, inverse_sqrt"),
        # 4,096 x 4 tokens for each process; a pack of 4,096 would make a step of 64 times that.
        (
            "--arch transformer --max-tokens 4096 --update-freq=4 --lr 3",
            r"^--arch, --max-tokens, --update-freq, --lr are not flags here: for --arch use --preset; for --max-tokens "
            r"and --update-freq use --batch.target-tokens-per-step.*multiply --max-tokens, --update-freq and the proc",
        ),
    ],
)
def test_a_wrong_flag_is_refused_by_name(words: str, said: str) -> None:
    folders = () if "--data" in words or "--run-dir" in words else HERE
    with pytest.raises(UserError, match=said):
        parsed(*folders, *words.split())


def test_help_names_presets_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """The short help has the most used flags, the other one all."""
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            parsed("--preset", "tiny", flag)
        assert stopped.value.code == 0
        texts[flag] = " ".join(capsys.readouterr().out.split())
        assert "Name of the preset, in the table above (default: tiny; one of tiny, multi30k" in texts[flag]
        assert "Steps between checkpoints (default: 100)" in texts[flag]
    assert "--help-all show all" in texts["--help"]
    assert "--variant" not in texts["--help"]
    for text in ("one of base, A1,", "Most target tokens per pack; longer sentences are left out (default: 1024)"):
        assert text in texts["--help-all"]
    assert "(default: inverse_sqrt; one of noam, inverse_sqrt, cosine, constant)" in texts["--help-all"]


def test_flags_win_over_the_file_and_that_over_the_preset(tmp_path: Path) -> None:
    file = written(tmp_path / "some.json", {"save_every": 7, "max_steps": 30, "model": {"dropout": 0.4, "heads": 2}})
    config = parsed("--preset", "tiny", "--config", file, "--model.heads", 8, *HERE)
    assert (config.checkpoints.save_every, config.max_steps, config.model.dropout) == (7, 30, 0.4)
    assert (config.model.heads, config.model.width) == (8, PRESETS["tiny"].model.width)


def test_toml_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('save_every = 7\ndata = ["a", "b"]\n[model]\ndropout = 0.4\n')
    config = parsed("--config", file, "--run-dir", "r")
    assert (config.checkpoints.save_every, config.model.dropout, config.corpora.data) == (7, 0.4, ("a", "b"))


def test_the_settings_of_a_run_serve_another_one(tmp_path: Path) -> None:
    """Its own folder, its data's identity and whether it had to be resumed are not taken over."""
    before = PRESETS["tiny"].changed(data=("d",), run_dir=Path("before"), seed=9, resume="required")
    plain = {**to_plain(before), "data_sha256": ["0"], "init_from_sha256": None, "deepspeed": {}}
    config = parsed("--config", written(tmp_path / "config.json", plain), "--run-dir", "after")
    assert config == before.changed(run_dir=Path("after"), resume="auto")


def test_a_run_has_the_architecture_of_its_model(tmp_path: Path) -> None:
    network = ModelConfig(width=48, heads=4, ffn_width=20, decoder_layers=2, dropout=0.4, activation="swish")
    model = {"model": {**to_plain(network), "vocab_size": 50, "max_positions": 99}}
    (tmp_path / "model").mkdir()
    written(tmp_path / "model" / "config.json", model)
    words = ("--init-from", tmp_path / "model", *HERE)
    expected = dataclasses.replace(network, max_positions=99, dropout=PRESETS["big"].model.dropout)
    assert parsed("--preset", "big", *words).model == expected
    assert parsed("--preset=big", f"--init_from={tmp_path / 'model'}", *HERE).model == expected
    file = written(tmp_path / "some.json", {"init_from": str(tmp_path / "model"), "model": {"dropout": 0.2}})
    assert parsed("--config", file, *HERE).model == dataclasses.replace(expected, dropout=0.2)
    # What is given stays, and is refused if it contradicts the weights.
    assert parsed("--model.heads", 6, *words).model.heads == 6
    assert parsed("--variant", "C4", *words).model.width == 256
    # A run that exists has the architecture in its own folder, wherever the model is now.
    (tmp_path / "run").mkdir()
    written(tmp_path / "run" / "config.json", model)
    gone = ("--init-from", tmp_path / "gone", "--data", "d")
    assert parsed(*gone, "--run-dir", tmp_path / "run").model.width == 48
    assert parsed(*gone, "--run-dir", "r").model == PRESETS["base"].model
    written(tmp_path / "model" / "config.json", {"model": {"width": "wide"}})
    with pytest.raises(UserError, match=r"^width in \S*model/config\.json"):
        parsed(*words)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '{"learning": 3}', r"a\.json, line 1, learning is not a setting here: leave it out$"),
        ("a.json", '{"norm": "pre"}', r"a\.json, line 1, norm is not a setting here: did you mean model\.norm\?$"),
        ("a.json", '{"lr": 3, "update_freq": [4]}', r"line 1, lr, update_freq are not settings here: for lr use optim"),
        ("a.toml", "[training]\nbatch_size = 3", r"a\.toml, training\.batch_size is not a setting here: use batch\."),
        (
            "a.json",
            '{"model": {"norm": "prr"}}',
            r"^model\.norm in \S*a\.json \(line 1\) must be 'post' or 'pre', not 'prr': did you mean",
        ),
        ("a.json", '{"max_steps": "many"}', r"^max_steps in \S*a\.json \(line 1\) must be int, not 'many'"),
        ("a.json", '{"max_steps": 0}', r"^max_steps in \S*a\.json \(line 1\) is 0: it must be above 0$"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        parsed("--config", tmp_path / name, *HERE)
    with pytest.raises(UserError, match=r"none\.json does not exist: check the path"):
        parsed("--config", tmp_path / "none.json", *HERE)


def test_weights_in_a_file_are_for_the_folders_of_the_flag(tmp_path: Path) -> None:
    file = written(tmp_path / "mix.json", {"data_weights": [1, 3]})
    config = parsed("--config", file, "--data", "a", "b", "--run-dir", "r")
    assert (config.corpora.data, config.corpora.data_weights) == (("a", "b"), (1, 3))
    for folders, said in (
        ((), "^pass --data: training reads data folders"),
        (("--data", "a"), "pass one weight above 0 for each folder of --data"),
    ):
        with pytest.raises(UserError, match=said):
            parsed("--config", file, *folders, "--run-dir", "r")


WITHOUT_EFFECT = [
    ("--optimizer.peak-lr", "0.001", ""),
    ("--optimizer.peak-lr", "1e-5", "--optimizer.schedule noam"),
    *(("--optimizer.lr-scale", "2", f"--optimizer.schedule {name}") for name in ("inverse_sqrt", "cosine", "constant")),
    ("--optimizer.momentum", "0.9", ""),
    ("--init-vocabulary", "shared_pieces", ""),
    ("--data-temperature", "5", ""),
    ("--data-weights", "1", ""),
    ("--validate-sentences", "9", "--validate-every 0"),
    ("--keep-best", "9", "--validate-every 0"),
    ("--validation-command-minutes", "9", ""),
    ("--batch.packs-per-step", "8", "--batch.target-tokens-per-step 4096"),
]


@pytest.mark.parametrize(("flag", "value", "others"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused(flag: str, value: str, others: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(flag)} (has no effect here, because|and .* both set)"):
        parsed(*HERE, flag, value, *others.split())
    *groups, name = flag[2:].replace("-", "_").split(".")
    number = json.loads(value) if value[0].isdigit() else value
    setting = [number] if name == "data_weights" else number
    # TOML has no null, and JSON the same names.
    file = written(tmp_path / "mine.json", {group: {name: setting} for group in groups} or {name: setting})
    with pytest.raises(UserError, match=rf"^{'.'.join([*groups, name])} in \S*mine\.json "):
        parsed(*HERE, "--config", file, *others.split())


def test_a_data_folder_counts_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    places = [str(tmp_path / name) for name in ("data", "other", "link")]
    config = TrainConfig.of(data=tuple(places[:2]), run_dir=tmp_path / "run")
    refuse_without_effect({}, config)
    for more in (places[0], f"{places[0]}/", places[2]):
        with pytest.raises(UserError, match=r"^--data has \S+/data twice: pass it once; a larger share of it is"):
            refuse_without_effect({}, config.changed(data=(*places[:2], more)))


def test_a_file_starts_no_program(tmp_path: Path) -> None:
    """It is untrusted. Words of the user take the place of its own."""
    command = {"validation_command": "theirs {hypothesis}", "best_by": "command"}
    file = written(tmp_path / "config.json", {**to_plain(PRESETS["base"]), "data_sha256": ["0"], **command})
    with pytest.raises(
        UserError,
        match=r"^validation_command in \S*config\.json \(line 1\) is a program, and no file may name one to run",
    ):
        parsed("--config", file, "--run-dir", "r")
    config = parsed("--config", file, "--run-dir", "r", "--validation-command", "mine {hypothesis}")
    assert (config.validation.validation_command, config.validation.best_by) == ("mine {hypothesis}", "command")
    config = parsed("--config", file, "--run-dir", "r", "--validation-command", "None", "--best-by", "nll")
    assert config.validation.validation_command is None


def test_a_setting_with_effect_is_taken(tmp_path: Path) -> None:
    config = parsed(*HERE, "--optimizer.schedule", "constant", "--optimizer.peak-lr", "1e-5")
    assert config.optimizer.peak_lr == 1e-5
    assert parsed(*HERE, "--optimizer.lr-scale", "2").optimizer.lr_scale == 2
    assert parsed(*HERE, "--batch.target-tokens-per-step", "4096").batch.packs_per_step == 10
    file = written(tmp_path / "mine.json", {"batch": {"target_tokens_per_step": 4096, "max_target_tokens": 1024}})
    assert parsed(*HERE, "--config", file).batch.packs_per_step == 4
    # A preset's own peak does not forbid noam, and neither do the settings of an earlier run.
    assert parsed(*HERE, "--preset", "tiny", "--optimizer.schedule", "noam").optimizer.schedule == "noam"
    plain = {**to_plain(PRESETS["base"]), "data_sha256": ["0"]}
    assert parsed("--config", written(tmp_path / "config.json", plain), "--run-dir", "r").optimizer.schedule == "noam"
