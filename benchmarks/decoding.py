"""Benchmark of decoding: our search, Hugging Face's `generate` and CTranslate2 on the same weights and lines, in turns.

Unit: sentences per second of the process' CPU time on a CPU, and of wall time on a GPU. The peers divide a hypothesis'
log probability by length^α. We divide by ((5 + length) / 6)^β, as the paper does, with the β that gives our outputs the
mean length of the peers', because the cost of a search grows with its outputs. The BLEU scores must be close.

Peers have variants, of which the fastest on the first lines takes part: the attention of transformers, and the sizes of
batches. CTranslate2 in int8 is a contender of its own, and so is our search in bf16 and int8 where fp32 is measured.
"""

import operator
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.measure import Measured, Part, columns, missing_packages, now, require_known, say, spread
from benchmarks.rows import decode_row
from benchmarks.training.peers import ATTENTIONS
from benchmarks.training.text import padded
from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import setting
from dist_transformer.data.text.lines import read_lines
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, PAD_ID, Tokenizer
from dist_transformer.evaluation.bleu import corpus_bleu
from dist_transformer.export.ctranslate2 import save_for_ctranslate2, translate_ids
from dist_transformer.export.marian import marian_model
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.loading import as_arithmetic
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import load_model, read_model_info
from dist_transformer.runtime.device import as_dtype, multiplies_bf16, multiplies_int8
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

LABELS = {
    "ours": "ours",
    "ours_bf16": "ours, bf16",
    "ours_int8": "ours, int8",
    "generate": "HF MarianMTModel, generate",
    "ctranslate2": "CTranslate2",
    "int8": "CTranslate2, int8",
}
_NEEDS = {"generate": ("transformers",), "ctranslate2": ("ctranslate2",), "int8": ("ctranslate2",)}
# Largest difference in BLEU between our search and a peer's on the same weights.
BLEU_TOLERANCE = 0.7
# Sentences, and padded source tokens, of a batch.
_GENERATE_SENTENCES, _CTRANSLATE2_TOKENS = (32, 64, 128), (512, 1024, 2048, 4096)
# α of the peers.
_LENGTH_PENALTY = 0.6
# Lines on which variants are tried.
_TRIED_LINES = 200

Translate = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBenchmark(Part):
    """Beam search, compared with Hugging Face's generate and CTranslate2."""

    model: Path
    """Model folder."""
    src: Path
    """Source, one sentence per line."""
    ref: Path
    """Reference, one sentence per line."""
    sentences: int | None = None
    """Only the first of them; default: all."""
    peers: tuple[str, ...] = tuple(LABELS)
    """Contenders: ours, also in bf16 and int8; generate, of MarianMTModel; ctranslate2, and in int8.
    Ours always takes part."""
    beam: int = 4
    """Beam size."""
    precision: Literal["bf16", "fp32"] | None = None
    """Precision of all contenders; default: fp32 on a CPU, bf16 on a GPU."""
    rounds: int = 4
    """Rounds; medians are reported."""
    max_extra_tokens: int = setting(default=50, python_only=True)

    def measure(self) -> Measured:
        require_known("--peers", self.peers, LABELS)
        sources, references = (list(read_lines(file))[: self.sentences] for file in (self.src, self.ref))
        if not sources or len(sources) != len(references):
            raise UserError(f"--src and --ref have {len(sources)} and {len(references)} lines: both need as many")
        with process_group(World()) as device:
            figures = run_decoding_benchmark(self, sources, references, device)
        flaw = "the BLEU scores differ: the contenders did not do the same work"
        return Measured(
            what=f"decoding compared with peers, in turns, on the same weights; {figures['unit']}; medians of rounds",
            figures=figures,
            table=decode_table(figures),
            rows=[decode_row([*figures["contenders"]], gpu=device.type == "cuda")],
            text=read_model_info(self.model),
            flaw=None if figures["scores_agree"] else flaw,
        )


def run_decoding_benchmark(
    settings: DecodeBenchmark, lines: list[str], references: list[str], device: torch.device
) -> dict[str, Any]:
    """Measure everything and return the figures."""
    dtype = as_dtype(settings.precision or ("bf16" if device.type == "cuda" else "fp32"))
    model, vocabulary, info = load_model(settings.model, device, dtype)
    tokenizer = vocabulary.target
    names = []
    for name, label in LABELS.items():
        if name not in ("ours", *settings.peers):
            continue
        if reason := obstacle(name, dtype, device):
            say(f"left out, because {reason}: {label}")
        else:
            names.append(name)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    outputs: dict[str, list[str]] = {}
    variants: dict[str, str] = {}
    others = [name for name in names if not name.startswith("ours")]
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as scratch:
        works: dict[str, Translate] = {}
        for name in others:
            found = make_peer(name, model, tokenizer, settings, Path(scratch))
            variants[name] = _fastest(found, lines[:_TRIED_LINES], device)
            works[name] = found[variants[name]]
            outputs[name] = works[name](lines)
            say(f"{LABELS[name]}: warm, {variants[name]}")
        lengths = [_mean_length(tokenizer, outputs[name]) for name in others]
        search = partial(our_search, model, tokenizer, settings)
        penalty = _LENGTH_PENALTY
        if lengths:
            penalty = matching_penalty(
                lambda exponent: _mean_length(tokenizer, search(length_penalty=exponent)(lines)),
                statistics.mean(lengths),
                least=penalty,
            )
        variants["ours"] = f"length penalty {penalty:.3g}"
        works["ours"] = search(length_penalty=penalty)
        for name in filter(names.__contains__, ("ours_bf16", "ours_int8")):
            arithmetic = as_arithmetic(name.removeprefix("ours_"), device)
            rounded, _, _ = load_model(settings.model, device, *arithmetic)
            works[name] = our_search(rounded, tokenizer, settings, length_penalty=penalty)
            works[name](lines)
            variants[name] = variants["ours"]
        whole = search(length_penalty=penalty, least_growth=model.config.max_positions)(lines)
        say(f"{LABELS['ours']}: warm, {variants['ours']}")
        for number in range(settings.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                outputs[name], taken = _timed(works[name], lines, device)
                seconds[name].append(taken)
            say(f"round {number + 1} of {settings.rounds}")
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        words = _mean_length(tokenizer, outputs[name]) * len(lines)
        ratios = (theirs / ours for ours, theirs in zip(seconds["ours"], seconds[name], strict=True))
        bleu = corpus_bleu(
            outputs[name], references, target_language=info.target_language, lowercase=tokenizer.lowercase
        )
        figures[name] = {
            "sentences_per_second": spread(len(lines) / s for s in seconds[name]),
            "tokens_per_second": spread(words / s for s in seconds[name]),
            "ours_to_this": spread(ratios),
            "bleu": bleu.value,
            "signature": bleu.signature,
            "variant": variants[name],
        }
    ours = figures["ours"]["bleu"]
    return {
        "unit": "sentences per CPU second" if device.type == "cpu" else "sentences per second",
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_steps": max(info.steps),
        "precision": _compute_type(dtype),
        "beam_size": settings.beam,
        "length_penalty": _LENGTH_PENALTY,
        "our_length_penalty": penalty,
        "sentences": len(lines),
        "rounds": settings.rounds,
        "changed_by_stopping": sum(map(operator.ne, outputs["ours"], whole)),
        "scores_agree": all(abs(found["bleu"] - ours) <= BLEU_TOLERANCE for found in figures.values()),
        "contenders": figures,
    }


def obstacle(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why a contender cannot be measured here, if there is one."""
    if missing := missing_packages(_NEEDS.get(name, ())):
        return f"{missing} is not installed"
    if name in ("ours_bf16", "ours_int8"):
        has_them = multiplies_bf16(device) if name == "ours_bf16" else multiplies_int8(device)
        fits = has_them and dtype == torch.float32
        return None if fits else "the processor has no instructions for it, or all are in bf16"
    if "ctranslate2" in _NEEDS.get(name, ()):
        import ctranslate2

        kind = "int8" if name == "int8" else _compute_type(dtype)
        computes = kind in ctranslate2.get_supported_compute_types(device.type)
        return None if computes else f"it does not compute in {kind} here"
    return None


def _timed(work: Translate, lines: Sequence[str], device: torch.device) -> tuple[list[str], float]:
    started = now(device)
    return work(lines), now(device) - started


def _fastest(works: dict[str, Translate], lines: Sequence[str], device: torch.device) -> str:
    """Return the name of the fastest variant, of two runs each."""
    seconds = {name: min(_timed(work, lines, device)[1] for _ in range(2)) for name, work in works.items()}
    return min(seconds, key=seconds.__getitem__)


def make_peer(
    name: str, model: Transformer, tokenizer: Tokenizer, settings: DecodeBenchmark, scratch: Path
) -> dict[str, Translate]:
    """Return the variants of a peer: functions that translate lines, from text to text."""
    device = model.embedding.device
    if name == "generate":
        works: dict[str, Translate] = {}
        for attention in ATTENTIONS:
            marian: Any = marian_model(model)
            marian = marian.to(device=device, dtype=model.embedding.dtype).eval()
            marian.set_attn_implementation(attention)
            for count in _GENERATE_SENTENCES:
                works[f"{attention} attention, {count} sentences"] = partial(
                    generate, marian, tokenizer, settings=settings, batch_sentences=count
                )
        return works
    kind = "int8" if name == "int8" else _compute_type(model.embedding.dtype)
    return ctranslate2_works(model, tokenizer, settings, scratch / name, kind)


def our_search(
    model: Transformer, tokenizer: Tokenizer, settings: DecodeBenchmark, *, length_penalty: float, **changes: Any
) -> Translate:
    beam = Decoding(
        beam=settings.beam,
        length_penalty=length_penalty,
        max_extra_tokens=settings.max_extra_tokens,
        **changes,
    )
    translator = Translator(model, tokenizer, model.embedding.device, beam)
    return lambda lines: [translation.text for translation in translator.translate(lines)]


def _mean_length(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    return statistics.mean(len(ids) + 1 for ids in tokenizer.encode_batch(list(texts)))


def matching_penalty(length_with: Callable[[float], float], wanted: float, least: float) -> float:
    """Return the exponent with which outputs have the wanted mean length, by bisection from `least` to its triple.

    Args:
        length_with: the mean length of the outputs with a given exponent, with which it grows.
    """
    low, high = least, 3 * least
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if length_with(middle) < wanted else (low, middle)
    return (low + high) / 2


def _compute_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ctranslate2_works(
    model: Transformer, tokenizer: Tokenizer, settings: DecodeBenchmark, folder: Path, kind: str
) -> dict[str, Translate]:
    import ctranslate2

    pieces = (tokenizer.pieces, tokenizer.pieces)
    save_for_ctranslate2(model, pieces, folder)
    translator = ctranslate2.Translator(
        str(folder),
        device=model.embedding.device.type,
        intra_threads=torch.get_num_threads(),
        inter_threads=1,
        compute_type=kind,
    )

    def work(lines: Sequence[str], max_batch_tokens: int) -> list[str]:
        sources = tokenizer.encode_batch(list(lines))
        ids = translate_ids(
            translator,
            pieces,
            sources,
            beam_size=settings.beam,
            length_penalty=_LENGTH_PENALTY,
            longest=max(map(len, sources)) + settings.max_extra_tokens,
            max_batch_tokens=max_batch_tokens,
        )
        return [tokenizer.decode(found) for found in ids]

    return {f"batches of {tokens} tokens": partial(work, max_batch_tokens=tokens) for tokens in _CTRANSLATE2_TOKENS}


def generate(
    marian: Any, tokenizer: Tokenizer, lines: Sequence[str], *, settings: DecodeBenchmark, batch_sentences: int
) -> list[str]:
    """Translate with MarianMTModel's `generate`, in batches of similar length, longest first."""
    sources = [[*ids, EOS_ID] for ids in tokenizer.encode_batch(list(lines))]
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    texts = [""] * len(sources)
    for start in range(0, len(order), batch_sentences):
        rows = order[start : start + batch_sentences]
        tokens = padded([sources[i] for i in rows], PAD_ID)
        with torch.inference_mode():
            found = marian.generate(
                input_ids=tokens.to(marian.device),
                attention_mask=(tokens != PAD_ID).long().to(marian.device),
                num_beams=settings.beam,
                length_penalty=_LENGTH_PENALTY,
                early_stopping=False,
                max_new_tokens=tokens.shape[1] + settings.max_extra_tokens,
                do_sample=False,
            )
        for i, ids in zip(rows, found.tolist(), strict=True):
            texts[i] = tokenizer.decode(ids)
    return texts


def decode_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    rows: list[tuple[str, ...]] = [("", "median", "lowest", "highest", "tokens/s", "ours is", "BLEU")]
    for name, found in figures["contenders"].items():
        rates = (f"{found['sentences_per_second'][each]:,.1f}" for each in ("median", "lowest", "highest"))
        tokens, times = (found[each]["median"] for each in ("tokens_per_second", "ours_to_this"))
        rows.append((LABELS[name], *rates, f"{tokens:,.0f}", f"{times:.2f}×", f"{found['bleu']:.2f}"))
    settings = f"beam {figures['beam_size']}, {figures['precision']}, {figures['sentences']:,} sentences"
    lines = [f"{figures['unit']}, {settings}", *columns(rows)]
    lines.append(f"{figures['changed_by_stopping']:,} of our texts differ from those of a search to the longest output")
    return "\n".join(lines)
