"""README.md and docs/ are true: links lead somewhere, the list of modules is whole, and commands run."""

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import yaml

from dist_transformer.cli.command import COMMANDS
from dist_transformer.config.presets import PRESETS
from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from dist_transformer.runtime.launch import free_port
from tests.config.test_wrong_names import flags_of
from tests.conftest import ROOT
from tests.slices import SLICES, chosen

README = ROOT / "README.md"
DOCS = ROOT / "docs"
# The pages of docs/ in the order of their index, which a reader follows, and so do the commands below.
INDEX = [
    DOCS / name
    for name in re.findall(r"^- \[.+?\]\((\w+\.md)\): \S", (DOCS / "README.md").read_text("utf-8"), re.MULTILINE)
]
# All pages of the site.
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), ROOT / "ds_configs" / "README.md"]

# A user waits days for these; a test takes the same commands to a few steps of a small model.
SMALL = (
    "--max-steps 10 --save-every 1 --model.width 32 --model.heads 2 --model.ffn-width 32 --model.encoder-layers 1 "
    "--model.decoder-layers 1 --model.max-positions 128 --batch.max-target-tokens 256 "
    "--batch.packs-per-step 2 --optimizer.warmup-steps 100"
)

FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<markdown>[^()\s]+)\)|\b(?:src|srcset|href)=\"(?P<html>[^\"]+)\"")
FLAG = re.compile(r"--[a-z][\w.-]*")


def fenced(page: Path, kind: str) -> list[str]:
    return [block["text"] for block in FENCE.finditer(page.read_text("utf-8")) if block["kind"] == kind]


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_the_index_has_a_line_for_every_page() -> None:
    assert sorted([*INDEX, DOCS / "README.md"]) == sorted(DOCS.glob("*.md"))


def test_the_site_has_every_page_in_its_navigation() -> None:
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(ROOT / name for name in re.findall(r"'([^']+\.md)'", nav)) == sorted(PAGES)


def test_the_page_of_settings_lists_every_preset_with_its_size() -> None:
    page = (DOCS / "settings.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \+ (\d+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    shown = {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in rows}
    assert shown == {
        name: (preset.model.encoder_layers, preset.model.decoder_layers, preset.model.width, preset.max_steps)
        for name, preset in PRESETS.items()
    }


def test_the_first_screen_of_the_readme_says_what_was_measured() -> None:
    text = " ".join(README.read_text("utf-8").split())
    found, rdrop, demo = (
        json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))["figures"]
        for name in ("quality/multi30k", "quality/multi30k-rdrop", "speed/demo")
    )
    plain, better = (figures["mean"]["bleu_tokenized"] for figures in (found, rdrop))
    assert f"reaches **{plain:.1f} BLEU**, the mean of three seeds, and **{better:.1f}** with [R-Drop]" in text
    assert f"](docs/multi30k.md) is {found['published_tokenized']}." in text
    assert f"BLEU {demo['bleu']:.1f} on the synthetic corpus" in text
    assert f"trained {demo['train_seconds']:.0f} s at {demo['target_tokens_per_second']:,.0f} target tokens/s" in text


def test_the_testing_page_lists_every_make_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    listed = re.findall(r"^\| `make ([\w-]+)", (DOCS / "testing.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(set(phony.split()) - {"clean"})
    assert {line.split()[1] for line in commands() if line.startswith("make ")} == {"demo", "test"} < {*listed}


def test_continuous_integration_builds_the_site_after_the_tests() -> None:
    targets = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert targets == ["check", "test", "docs", "test-all"]


def test_the_testing_page_lists_every_slice() -> None:
    section = (DOCS / "testing.md").read_text("utf-8").partition("\n## Slices\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE) == sorted(SLICES)
    named = {
        ast.literal_eval(node.keywords[0].value)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.slice"
    }
    assert named == SLICES.keys()


def test_the_pages_for_newcomers_name_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of other toolkits are in the first column of a table."""
    helps = "".join(file.read_text("utf-8") for file in (ROOT / "tests" / "cli" / "help").glob("*.txt"))
    # Help of a command with many flags shows some of them.
    listed = [*re.findall(FLAG, helps), *(flag for command in COMMANDS for flag in flags_of(command, capsys))]
    known = {flag.replace("_", "-") for flag in listed}
    for name in ("coming_from.md", "troubleshooting.md"):
        lines = (DOCS / name).read_text("utf-8").splitlines()
        ours = [line.partition("|")[2].partition("|")[2] if line.startswith("|") else line for line in lines]
        named = {flag.replace("_", "-") for line in ours for flag in re.findall(FLAG, line)}
        assert len(named) > 15
        # A flag of DeepSpeed's launcher, one of fairseq whose value ours is computed from, and keywords in Python.
        others = {"--master-port", "--update-freq", "--source-language", "--target-language"}
        assert named - known <= others, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """`make docs` finds this and anchors that are not there, but it needs packages that other tests do without."""
    links = [link["markdown"] or link["html"] for link in LINK.finditer(FENCE.sub("", page.read_text("utf-8")))]
    names = [link.partition("#")[0] for link in links if not re.match(r"\w+:|#", link)]
    assert [name for name in names if not (page.parent / name).exists()] == []


def test_the_map_of_the_package_is_that_of_its_rooms() -> None:
    programs = [[sys.executable, f"docs/site/{name}.py"] for name in ("modules", "picture")]
    table, picture = (subprocess.check_output(program, cwd=ROOT, text=True) for program in programs)
    page = (DOCS / "architecture.md").read_text("utf-8")
    assert table in page, "put the output of docs/site/modules.py on the page"
    shown = (DOCS / "images" / "architecture.svg").read_text("utf-8")
    assert picture == shown, "write the output of docs/site/picture.py there"
    # Places that the page names, inside the package or the repository.
    places = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9.]+)*/?)`", page.partition("## Where to change what")[2])
    missing = [place for place in places if "/" in place and not (ROOT / "dist_transformer" / place).exists()]
    assert [place for place in missing if not (ROOT / place).exists()] == []


def test_pages_link_to_the_glossary() -> None:
    texts = {page: FENCE.sub("", page.read_text("utf-8")) for page in [README, *INDEX] if page.name != "glossary.md"}
    used = [page for page, text in texts.items() if re.search(r"(?<![.-])\b(packs?|ledger)\b(?![.-])", text)]
    assert [page.name for page in used if "glossary.md" not in texts[page]] == []


def commands() -> list[str]:
    """List what a user types, page by page; a command may take several lines that end with backslashes."""
    blocks = [block.replace("\\\n", "") for page in [README, *INDEX] for block in fenced(page, "bash")]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_nothing_is_installed_from_an_index_by_the_projects_name() -> None:
    """The project is on no index, so such a command fails, or brings what a stranger has put there."""
    files = [*PAGES, *(ROOT / "dist_transformer").rglob("*.py")]
    assert [file for file in files if re.search(r"install ['\"]?dist[-_]transformer", file.read_text("utf-8"))] == []


def in_small(command: str, hub_folder: Path) -> str:
    """The command, with a small model, two processes and a local dataset in place of the hub's."""
    dataset, ted = shlex.quote(str(hub_folder)), shlex.quote(str(hub_folder.parent / "ted"))
    for written, small in (
        ("--num_gpus 8", "--num_gpus 2"),
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("mpirun -n 8", "mpirun -n 2"),
        ("deepspeed --num", f"deepspeed --master_port {free_port()} --num"),
        ("--dataset wmt14 --dataset-config de-en", f"--dataset {dataset}"),
        ("--dataset IWSLT/iwslt2017", f"--dataset {ted}"),
        # What a hardly trained model makes of a text is no sentence that a preparation would keep.
        ("--src mono.en", "--src valid.en"),
        # A store of the test's own: the folder that the page before has made.
        ("s3://corpora/mine", "file://$PWD/data/more"),
        ("/scratch/cache", "cache"),
    ):
        command = command.replace(written, small)
    command = re.sub(r"--vocab-size (8000|32000|37000)\b", "--vocab-size 400", command)
    for start, more in (
        ("dist_transformer doctor", "--run-gib 0.01"),
        ("benchmark.py train", "--peers plain --steps 1 --rounds 1 -- --batch.max-target-tokens 256"),
        ("benchmark.py decode", "--peers ctranslate2 --rounds 1"),
        ("benchmark.py data", "--seconds 0.01 --repeats 2 --text-pairs 50 --memory-pairs 50"),
    ):
        if start in command:
            return f"{command} {more}"
    if re.search(r"dist[-_]transformer train ", command) is None:
        return command
    for flag in SMALL.split()[::2]:
        command = re.sub(rf" {re.escape(flag)}[ =]\S+", "", command)
    return f"{command} {SMALL}"


@pytest.mark.slice(name="commands")
def test_every_command_runs_in_the_order_of_the_pages(tmp_path: Path) -> None:
    corpus = make_toy_corpus(train_pairs=400, valid_pairs=20, test_pairs=20, links=True)
    write_toy_corpus(tmp_path, corpus)
    shutil.copy(tmp_path / "test.en", tmp_path / "web.en")
    shutil.copy(tmp_path / "valid.de", tmp_path / "mono.de")
    (tmp_path / "begun.de").write_text("".join(f"{target.split()[0]}\n" for _, target in corpus.test), encoding="utf-8")
    # What an export is judged by: 1,000 lines.
    for side, name in enumerate(("dev.en", "dev.de")):
        lines = itertools.islice(itertools.cycle(corpus.train), 1000)
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in lines), encoding="utf-8")
    multi30k = tmp_path / "multi30k"
    multi30k.mkdir()
    for name, there in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        for language in ("en", "de"):
            shutil.copy(tmp_path / f"{name}.{language}", multi30k / f"{there}.{language}")
    hub = tmp_path / "hub"
    hub.mkdir()
    rows = [json.dumps({"translation": {"en": english, "de": german}}) for english, german in corpus.train]
    (hub / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for split, pairs in (("train", corpus.train), ("validation", corpus.valid)):
        folder = tmp_path / "ted" / "iwslt2017-en-zh" / split
        folder.mkdir(parents=True)
        talks = [{"translation": {"en": english, "zh": german}} for english, german in pairs]
        datasets.Dataset.from_list(talks).to_parquet(folder / "0000.parquet")
    for name in ("tools", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "HF_HOME": str(tmp_path / "hf"),
        "MULTI30K": str(multi30k),
    }
    typed = [line for line in commands() if line.split()[0] not in ("make", "source", "tensorboard", "pip", "export")]
    assert len(typed) == 73
    for line in typed:
        done = subprocess.run(
            ["bash", "-c", in_small(line, hub)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for name in ("test.hyp.de", "web.de", "web.sampled.de", "test.best.jsonl"):
        assert len((tmp_path / name).read_text(encoding="utf-8").splitlines()) == 20


def test_the_hash_chooses_among_the_slices_of_the_changed_files() -> None:
    """`docs/` calls for `commands`, and `slurm/` for both of SLURM: sorted, an even hash gives the first of two."""
    assert chosen("f", ["docs/data.md"]) == "commands"
    assert [chosen(commit, ["slurm/train_big.sh"]) for commit in ("10", "11")] == ["slurm-ends", "slurm-jobs"]


def test_without_a_changed_file_every_slice_has_its_turn() -> None:
    turns = {chosen(f"{number:x}", [".gitignore"]) for number in range(100)}
    # That one is always run.
    assert turns == SLICES.keys() - {"smoke"}
