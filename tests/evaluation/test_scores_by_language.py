"""Scores under every spelling of a language are those of sacreBLEU's own command with that language's tokeniser."""

import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.evaluation.bleu import count_edits, edit_rate
from dist_transformer.evaluation.compare import compare

# Hypotheses and references, with punctuation, numbers and words in Latin letters.
ENGLISH = (
    ["The cat sat on the mat, didn't it?", "It cost $3.50."],
    ["The cat sat on a mat, didn't it?", "It costs $3.50."],
)
CHINESE = (["我们今天去北京，坐 G7 次列车。", "他不喜欢狗。"], ["我们明天去北京，坐 G7 次列车。", "他喜欢狗和猫。"])
JAPANESE = (
    ["昨日、東京で友達に会いました。", "これは NHK の本です。"],
    ["昨日、京都で友達に会った。", "それは NHK の本です。"],
)
KOREAN = (["나는 어제 친구를 만났습니다.", "이것은 책입니다."], ["나는 어제 친구들을 만났다.", "그것은 책입니다."])
THAI = (["ฉันชอบกินข้าวผัด", "เขาไปโรงเรียนทุกวัน"], ["ฉันชอบกินผัดไทย", "เขาไปโรงเรียนเมื่อวาน"])
LANGUAGES = [
    (ENGLISH, "13a", "en eng eng_Latn en-US"),
    (CHINESE, "zh", "zh zho zho_Hans chi cmn zh-CN"),
    (JAPANESE, "char", "ja jpn jpn_Jpan"),
    (KOREAN, "char", "ko kor kor_Hang"),
    (THAI, "char", "th tha tha_Thai"),
]


@pytest.mark.system
@pytest.mark.parametrize(("texts", "tokenizer", "codes"), LANGUAGES, ids=[codes.split()[0] for *_, codes in LANGUAGES])
def test_scores_are_those_of_sacrebleu(
    texts: tuple[list[str], list[str]], tokenizer: str, codes: str, tmp_path: Path
) -> None:
    files = [tmp_path / "hypotheses", tmp_path / "references"]
    for file, lines in zip(files, texts, strict=True):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def by_command(*options: str) -> float:
        program = [
            str(Path(sys.executable).with_name("sacrebleu")),
            str(files[1]),
            "-i",
            str(files[0]),
            "-b",
            "-w",
            "6",
        ]
        return float(subprocess.run([*program, *options], capture_output=True, text=True, check=True).stdout)

    bleu = by_command("--tokenize", tokenizer)
    ter = by_command("-m", "ter", *(() if tokenizer == "13a" else ("--ter-normalized", "--ter-asian-support")))
    # Not 0, as of words that never match, and not 100.
    assert 10 < bleu < 90
    for code in codes.split():
        report = compare(files[:1], files[1:], target_language=code).report()
        assert report["bleu"] == pytest.approx(bleu, abs=1e-6), code
        assert report["ter"] == pytest.approx(ter, abs=1e-6), code
        assert f"|tok:{tokenizer}|" in report["signatures"]["bleu"]
        edits, words, _ = count_edits(*texts, target_language=code)
        assert edit_rate(edits, words) == pytest.approx(ter, abs=1e-6)
