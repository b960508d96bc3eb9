"""The command line of `dist-transformer train`, without training."""

import dataclasses
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.flags import parse_training
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig

FOLDERS = ["--data", "corpus/de", "--run-dir", "runs/1"]


def settings(arguments: list[str]) -> TrainConfig:
    return parse_training(arguments)[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_defaults(preset: str) -> None:
    more, values = ([], {}) if preset != "finetune" else (["--init-from", "gone"], {"init_from": Path("gone")})
    config = settings(["--preset", preset, *FOLDERS, *more])
    assert config == PRESETS[preset].changed(data=("corpus/de",), run_dir=Path("runs/1"), **values)


def test_base_is_the_preset_when_none_is_given() -> None:
    assert settings(FOLDERS) == settings(["--preset=base", *FOLDERS])


def test_nested_settings_have_flags_of_their_names() -> None:
    flags = (
        "--model.width 64 --model.head-width 8 --model.norm pre --model.tie-embeddings none --batch.packs-per-step 4 "
        "--batch.max_source_tokens 99 --optimizer.schedule cosine --optimizer.peak-lr 2e-3"
    )
    config, tiny = settings(["--preset", "tiny", *FOLDERS, *flags.split()]), PRESETS["tiny"]
    assert config.model == dataclasses.replace(tiny.model, width=64, head_width=8, norm="pre", tie_embeddings="none")
    assert config.batch == dataclasses.replace(tiny.batch, packs_per_step=4, max_source_tokens=99)
    assert config.optimizer == dataclasses.replace(tiny.optimizer, schedule="cosine", peak_lr=2e-3)


def test_an_override_may_stand_before_the_preset() -> None:
    config = settings(["--model.dropout", "0.25", *FOLDERS, "--preset", "big"])
    assert (config.model.dropout, config.model.width) == (0.25, 1024)


def test_a_variant_changes_the_preset() -> None:
    config = settings(["--preset", "multi30k", "--variant", "C5", *FOLDERS])
    assert (config.model.width, config.model.attention_head_width) == (256, 64)
    assert config.batch == PRESETS["multi30k"].batch
    assert settings(["--variant=E", *FOLDERS]).model.positions == "learned"


def test_a_flag_overrides_the_variant() -> None:
    config = settings(["--preset", "base", "--variant", "big", *FOLDERS, "--max-steps", "9"])
    assert (config.model, config.max_steps) == (PRESETS["big"].model, 9)


@pytest.mark.parametrize("missing", ["--data", "--run-dir"])
def test_the_folders_are_required(missing: str) -> None:
    at = FOLDERS.index(missing)
    with pytest.raises(UserError, match=f"^pass {missing}: "):
        settings(["--preset", "tiny", *FOLDERS[:at], *FOLDERS[at + 2 :]])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model.norm sandwich", "--model.norm sandwich is unknown: choose one of post, pre"),
        # A switch until 0.1.0.
        ("--compile", "--compile needs a value: choose one of auto, on, off"),
        ("--precision fp16", "--precision fp16 is unknown: did you mean bf16?"),
        ("--preset bsae", "--preset bsae is unknown: did you mean base?"),
        ("--preset huge", "--preset huge is unknown: choose one of tiny, multi30k, finetune, "),
        ("--preset finetune", "--preset finetune trains a model further: pass it with --init-from, or choose"),
        ("--variant C8", "--variant C8 is unknown: choose one of base, A1, A2, "),
        ("--optimizer.schedule linear", "--optimizer.schedule is 'linear': pass the file that registers this schedule"),
        ("--max-steps many", "--max-steps is 'many': it must be a whole number"),
        ("--batch.packs-per-step 0", "--batch.packs-per-step is 0: it must be above 0"),
        ("--xyz 3", "--xyz is not a flag here: see "),
        # An abbreviation of --preset is no way to set it.
        ("--pres tiny", "--pres is not a flag here: did you mean --preset?"),
        (
            "--width 3 --model.head 2",
            "for --width use --model.width; for --model.head use --model.heads",
        ),
        ("-max-steps 3", "-max-steps is not a flag here: did you mean --max-steps?"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        settings([*FOLDERS, *flags.split()])
    assert said in str(refused.value)


@pytest.mark.parametrize("flag", [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"]])
def test_what_deepspeeds_launcher_adds_is_accepted(flag: list[str]) -> None:
    assert settings([*flag, "--preset", "tiny", *FOLDERS]) == settings(["--preset", "tiny", *FOLDERS])


def test_help_names_presets_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """The short help has the most used flags, the other one all."""
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            settings(["--preset", "tiny", flag])
        assert stopped.value.code == 0
        texts[flag] = " ".join(capsys.readouterr().out.split())
        assert "Name of the preset, in the table above (default: tiny; one of tiny, multi30k" in texts[flag]
        assert "Steps between checkpoints (default: 100)" in texts[flag]
    assert "--help-all show all" in texts["--help"]
    assert "--variant" not in texts["--help"]
    for text in ("one of base, A1,", "Most target tokens per pack; longer sentences are left out (default: 1024)"):
        assert text in texts["--help-all"]
    assert "(default: inverse_sqrt; one of noam, inverse_sqrt, cosine, constant)" in texts["--help-all"]
