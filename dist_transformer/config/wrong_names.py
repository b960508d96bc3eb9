"""Names that a command, a file of settings or a function does not have: those of other toolkits, and near misses."""

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from dist_transformer.base.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

LIST_FLAGS = "--list-flags"
"""Word that makes a command print its flags and their choices, one flag per line, for completion in a shell."""

_STEP = (
    "--batch.target-tokens-per-step, the target tokens of a step on all processes together, as --batch.packs-per-step "
    "packs of --batch.max-target-tokens"
)
_STEP_OF_FAIRSEQ = f"{_STEP} (for fairseq's, multiply --max-tokens, --update-freq and the processes)"
_STEP_ALONE = f"{_STEP}; accumulation follows from it and the processes"
_PEAK = "--optimizer.peak-lr, or --optimizer.lr-scale with the noam schedule"
_STEPS = "--max-steps; `plan` prints how many epochs that is"
_DATA = "--data with a folder that dist-transformer prepare makes of the text"
_RANKS = "--processes N of the program dist-transformer, one process per GPU, or a launcher such as torchrun"
_RESUME = "--init-from with a model folder; a run resumes by itself"
_SINK = "--import FILE.py with a sink that you register (docs/extending.md); TensorBoard's files are always written"
_WANDB = "--import dist_transformer.reporting.wandb_sink, which sends the records of a run to Weights & Biases"
_NO_MODEL = "--preset for the network, --init-from for a model to start from, or --run-dir for the folder to write"
_DIRECTION = "--direction SRC-TGT, such as en-de"

# Our counterparts, and the names that other toolkits have for them: fairseq, Marian, OpenNMT, Eole, Sockeye, Hugging
# Face's Trainer and generate, Lightning. The first one applies whose first flag the command has; one without flags
# always does.
_COUNTERPARTS: dict[tuple[str, ...], str] = {
    # Training: the batch and the schedule.
    (_STEP, "--batch-tokens"): "batch-size per-device-train-batch-size per-gpu-train-batch-size train-batch-size "
    "mini-batch mini-batch-words maxi-batch batch-type required-batch-size-multiple global-batch-size micro-batch-size",
    (_STEP_OF_FAIRSEQ, "--batch-tokens", "--batch.max-target-tokens"): "max-tokens",
    (_STEP_OF_FAIRSEQ,): "update-freq",
    (_STEP_ALONE,): "accum-count accumulate accumulation-steps gradient-accumulation-steps grad-accum update-interval "
    "accumulate-grad-batches optimizer-delay",
    ("--batch-tokens",): "max-batch-size eval-batch-size per-device-eval-batch-size valid-batch-size max-tokens-valid "
    "batch-size-valid max-batch-tokens",
    ("--max-sentences", "--batch.max-sentences", "--batch-tokens"): "max-sentences",
    (_PEAK,): "lr learning-rate learn-rate initial-learning-rate base-lr max-lr",
    ("--optimizer.min-lr",): "stop-min-lr min-learning-rate end-learning-rate",
    ("--optimizer.schedule",): "lr-scheduler lr-scheduler-type learning-rate-scheduler-type decay-method scheduler "
    "lr-schedule",
    ("--optimizer.warmup-steps",): "warmup warmup-updates warmup-steps lr-warmup learning-rate-warmup num-warmup-steps "
    "warmup-ratio",
    ("--optimizer.beta1 and --optimizer.beta2",): "adam-betas betas optimizer-params optimizer-betas",
    ("--optimizer.beta1",): "adam-beta1",
    ("--optimizer.beta2",): "adam-beta2",
    ("--optimizer.epsilon",): "adam-eps adam-epsilon eps",
    ("--optimizer.max-grad-norm",): "clip-norm clip-grad-norm clip-gradient gradient-clip-val grad-clip "
    "gradient-clipping gradient-clipping-threshold",
    (_STEPS,): "epochs max-epoch max-epochs num-epochs num-train-epochs after-epochs max-num-epochs e",
    ("--max-steps",): "max-update max-updates train-steps num-steps num-train-steps after-batches total-steps "
    "total-num-update max-iter max-iters",
    ("--optimizer.rdrop-alpha",): "reg-alpha rdrop rdrop-alpha rdrop-coef",
    ("--ema-decay",): "ema exponential-smoothing average-decay",
    ("--freeze",): "freeze-encoder freeze-decoder freeze-embeddings freeze-word-vecs-enc freeze-word-vecs-dec "
    "fixed-param-names fixed-param-strategy",
    ("--seed",): "random-seed manual-seed",
    # Training: what is saved, checked and reported.
    ("--save-every",): "save-interval save-interval-updates save-steps save-freq save-checkpoint-steps "
    "checkpoint-interval checkpoint-every",
    ("--keep-checkpoints",): "keep-checkpoint keep-last-epochs keep-interval-updates keep-last-params save-total-limit "
    "keep-last",
    ("--keep-best",): "keep-best-checkpoints save-best",
    ("--validate-every",): "validate-interval validate-interval-updates valid-freq valid-steps eval-steps eval-every "
    "eval-interval",
    ("--best-by",): "best-checkpoint-metric metric-for-best-model optimized-metric valid-metrics",
    ("--validation-command",): "valid-script-path",
    ("--patience",): "early-stopping early-stopping-patience max-num-checkpoint-not-improved",
    ("--log-every",): "log-interval log-freq logging-steps disp-freq report-every",
    (_WANDB,): "wandb wandb-project use-wandb report-to",
    (_SINK,): "tensorboard tensorboard-logdir tensorboard-log-dir",
    (_RESUME, "--model"): "restore-file finetune-from-model train-from resume-from-checkpoint pretrained-model params "
    "model-name-or-path load-checkpoint",
    ("--test-mode",): "dry-run smoke-test",
    ("--deepspeed_config, with the name of a shipped one (zero2) or a file",): "deepspeed zero ds-config zero-stage",
    ("--compile on",): "torch-compile compile-model",
    # The network.
    ("--preset",): "arch architecture type model-type task a",
    ("--model.width",): "d-model hidden-size encoder-embed-dim decoder-embed-dim dim-emb word-vec-size embed-dim "
    "transformer-model-size dim",
    ("--model.ffn-width",): "encoder-ffn-embed-dim decoder-ffn-embed-dim transformer-ff transformer-dim-ffn d-ff "
    "ffn-dim transformer-feed-forward-num-hidden",
    ("--model.heads",): "encoder-attention-heads decoder-attention-heads transformer-heads num-heads n-heads "
    "transformer-attention-heads",
    ("--model.encoder-layers and --model.decoder-layers",): "layers num-layers n-layers",
    ("--model.encoder-layers",): "enc-layers enc-depth num-encoder-layers",
    ("--model.decoder-layers",): "dec-layers dec-depth num-decoder-layers",
    ("--model.dropout",): "transformer-dropout dropout-rate",
    ("--model.ffn-dropout",): "activation-dropout relu-dropout transformer-dropout-ffn",
    ("--model.activation",): "activation-fn transformer-ffn-activation",
    ("--model.norm, post or pre",): "encoder-normalize-before decoder-normalize-before pre-norm layer-norm-first "
    "transformer-postprocess",
    ("--model.positions",): "position-encoding encoder-learned-pos transformer-train-position-embeddings",
    ("--model.max-positions",): "max-source-positions max-target-positions max-seq-len",
    ("--model.tie-embeddings all, the default",): "share-all-embeddings share-embeddings tied-embeddings-all "
    "weight-tying",
    ("--model.tie-embeddings target",): "share-decoder-input-output-embed share-decoder-embeddings tied-embeddings "
    "tied-embeddings-src",
    ("--model.tie-embeddings none",): "model.no-tie-embeddings",
    # The machine.
    ("--precision bf16, which needs no loss scaling",): "fp16 half amp mixed-precision memory-efficient-fp16",
    ("--precision bf16",): "bf16 bfloat16",
    ("--precision fp32",): "fp32 float32 no-amp",
    ("--precision int8, of translate and evaluate",): "int8 gemm-type",
    ("--precision",): "dtype torch-dtype model-dtype compute-type",
    ("--gpus", _RANKS, "--device"): "gpus n-gpus num-gpus ngpus gpu-ranks gpu-ids device-ids devices world-size "
    "distributed-world-size nproc nproc-per-node num-processes num-devices d",
    ("--device cpu", "CUDA_VISIBLE_DEVICES= in the environment, which hides the GPUs"): "cpu use-cpu no-cuda",
    ("--device",): "gpu device-id cuda",
    ("--workers",): "num-workers num-proc threads num-threads cpu-threads dataloader-num-workers",
    # Text and data.
    ("--src", "--input", "--src-text", _DATA): "source src src-file source-file input-file train-src trainpref i input",
    ("--tgt", "--ref", "--tgt-text", _DATA): "target tgt tgt-file target-file train-tgt",
    ("--src and --tgt", _DATA): "train-sets train-file train-data data-path corpora data-dir",
    ("--valid-src and --valid-tgt", "--src"): "valid-sets validpref validation-file valid-file",
    ("--valid-src",): "validation-source valid-source dev-src",
    ("--valid-tgt",): "validation-target valid-target dev-tgt",
    ("--ref",): "reference references refs",
    ("--hypotheses",): "sys hyp hyps hypothesis system",
    ("--src-lang", "--source-language", _DIRECTION, _DATA): "src-lang source-lang source-language src-language s",
    ("--tgt-lang", "--target-language", _DIRECTION, _DATA): "tgt-lang target-lang target-language tgt-language t",
    ("--src-lang and --tgt-lang", _DIRECTION): "langs lang-pairs language-pair lang-pair direction",
    ("--vocab-size", _DATA): "src-vocab-size tgt-vocab-size num-words bpe-size num-operations num-merges vocab-size "
    "joint-vocab-size dim-vocabs",
    ("--tokenizer", _DATA): "vocab vocabs spm-model bpe bpe-codes codes sentencepiece-model sentencepiece-vocabs "
    "tokenizer v",
    ("--segmentation-dropout", _DATA): "bpe-dropout",
    ("--segmentation-alpha", _DATA): "sampling-alpha sentencepiece-alphas src-subword-alpha tgt-subword-alpha",
    ("--src-tokenizer", _DATA): "src-vocab srcdict source-vocab",
    ("--tgt-tokenizer", _DATA): "tgt-vocab tgtdict target-vocab",
    ("--max-tokens", "--batch.max-source-tokens and --batch.max-target-tokens", "--max-extra-tokens"): "max-length "
    "max-len src-seq-length tgt-seq-length max-seq-length max-source-length max-target-length",
    ("--lowercase",): "lower lc do-lower-case",
    ("--dataset-config",): "dataset-config-name subset",
    ("--dataset",): "dataset-name",
    # Search.
    ("--model", "--checkpoints", _NO_MODEL): "model path model-path model-dir models model-name checkpoint ckpt m",
    ("--beam",): "beam-size num-beams beamsize n-beams b",
    ("--beam 1",): "greedy",
    ("--nbest",): "n-best nbest-size num-return-sequences num-hypotheses",
    ("--length-penalty",): "lenpen alpha normalize lp length-penalty-alpha length-penalty-weight",
    ("--max-extra-tokens",): "max-len-a max-len-b max-new-tokens max-output-length max-decoding-length "
    "max-length-factor",
    ("--sample",): "sampling do-sample random-sampling",
    ("--top-k",): "sampling-topk random-sampling-topk output-sampling",
    ("--top-p",): "sampling-topp random-sampling-topp nucleus-sampling",
    ("--epsilon",): "epsilon-cutoff epsilon-sampling",
    ("--prefix",): "prefix-file target-prefix",
    ("--temperature",): "random-sampling-temp sampling-temperature softmax-temperature temp",
    # Outputs.
    ("--output", "--out", "--json"): "output output-file o out",
    ("--out", "--output", "--run-dir"): "output-dir out-dir outdir destdir",
    ("--run-dir",): "save-dir save-model run run-folder default-root-dir log-dir logdir",
    ("--json",): "results-path output-json",
    # Averaging.
    ("--checkpoints",): "inputs checkpoint-paths",
    ("--last",): "num-epoch-checkpoints num-update-checkpoints num-checkpoints n",
    # Exporting.
    ("--quantize",): "quantization quantisation",
    # Settings.
    ("--config with a JSON file",): "config-file config-path c",
}
_OURS = {name: ours for ours, names in _COUNTERPARTS.items() for name in names.split()}
_COMMANDS = {
    name: ours
    for ours, names in {
        "prepare": "preprocess build-vocab binarize tokenize fairseq-preprocess onmt-build-vocab prepare-data",
        "train": "fit fairseq-train onmt-train marian finetune",
        "average": "average-checkpoints params-average average-models",
        "translate": "generate interactive decode decoder infer predict fairseq-generate fairseq-interactive "
        "onmt-translate",
        "evaluate": "eval test bleu sacrebleu validate evaluate-bleu",
        "score": "scorer fairseq-score marian-scorer",
        "export": "convert convert-model release-model",
        "serve": "server web rest",
        "verify": "check verify-run",
    }.items()
    for name in names.split()
}
_FLAG = re.compile(r"--([a-z][\w.-]*)")
# Of a name; shorter ones resemble too many. Choices are few, so less is enough for them.
_NEAR, _NEAR_CHOICE = 0.7, 0.55


def plain_name(flag: str) -> str:
    """Give the name that all spellings of a flag share: with hyphens, without the `no-` that switches it off."""
    return re.sub(r"(^|\.)no-", r"\1", flag.lstrip("-").replace("_", "-"))


def nearest(word: str, known: Iterable[str], *, cutoff: float = _NEAR_CHOICE) -> str | None:
    """Find the choice that a user meant by a word; None if nothing is near."""
    lowered = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def meant(word: str, known: Collection[str]) -> str:
    """Write the remedy for a word that is no choice: the nearest choice, or all."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(known)}"


def command_meant(name: str, commands: Iterable[str]) -> str | None:
    """Find the command that a user meant, also by its name in another toolkit."""
    return _COMMANDS.get(plain_name(name)) or nearest(name, commands, cutoff=_NEAR)


def refuse_wrong_flags(
    words: Sequence[str],
    known: Collection[str],
    *,
    program: str,
    also: Iterable[str] = (),
    any_spelling: bool = False,
) -> None:
    """Refuse the flags that a command does not have, all at once. A command line that asks for help has none.

    Args:
        words: command line; after `--` there are no flags.
        known: flags of the command.
        program: command, for the way to its help.
        also: flags that the program takes out of the command line before.
        any_spelling: whether the command takes `--a_b` and `--no-a-b` for `--a-b`.

    Raises:
        UserError: there are such flags; the message has the counterpart or the nearest flag of each.
    """
    ends = words.index("--") if "--" in words else len(words)
    flags = [word.partition("=")[0] for word in words[:ends] if re.match(r"--?[A-Za-z]", word) and " " not in word]
    if {"-h", "--help"} & set(flags):
        return
    names = {plain_name(flag) for flag in known}
    wrong = [flag for flag in dict.fromkeys(flags) if not _is_flag(flag, known, names if any_spelling else ())]
    if wrong:
        every = names | {plain_name(flag) for flag in also}
        remedies = {flag: _remedy(flag, every) or f"see {program} --help" for flag in wrong}
        raise UserError(_refusal(remedies, "flag"))


def _is_flag(flag: str, known: Collection[str], names: Collection[str]) -> bool:
    # The value of a letter may follow it without a space.
    return flag in known or (plain_name(flag) in names if flag.startswith("--") else flag[:2] in known)


def refuse_wrong_settings(
    names: Iterable[str], known: Collection[str], where: str, *, only_with_remedy: bool = False
) -> None:
    """Refuse the settings that a file or a function does not have, all at once.

    Args:
        where: file or function, for the message.
        only_with_remedy: pass over names that resemble nothing, because a later check explains them.

    Raises:
        UserError: there are such settings; the message has the counterpart or the nearest setting of each.
    """
    plain = {plain_name(name) for name in known}
    remedies = {name: _remedy(name, plain) for name in names if plain_name(name) not in plain}
    if only_with_remedy:
        remedies = {name: remedy for name, remedy in remedies.items() if remedy}
    if remedies:
        written = {name: _as_setting(remedy or "leave it out") for name, remedy in remedies.items()}
        raise UserError(f"in {where}, {_refusal(written, 'setting')}")


def refuse_wrong_choices(words: Sequence[str], choices: Mapping[str, Sequence[str]]) -> None:
    """Refuse the value of a flag that is none of its choices; `choices` has the flags in any spelling.

    Raises:
        UserError: there is one; the message has the nearest choice, or all.
    """
    known = {plain_name(flag): values for flag, values in choices.items()}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, sign, value = word.partition("=")
        values = known.get(plain_name(flag), ()) if flag.startswith("--") else ()
        if values and (value := value if sign else following) not in values:
            if not value or value.startswith("--"):
                raise UserError(f"{flag} needs a value: choose one of {', '.join(values)}")
            raise UserError(f"{flag} {value:.60} is unknown: {meant(value, values)}")


def known_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse keywords that a function does not have as wrong settings, with their counterparts here."""

    @functools.wraps(function)
    def checked(*arguments: P.args, **named: P.kwargs) -> R:
        refuse_wrong_settings(named, inspect.signature(function).parameters, function.__name__)
        return function(*arguments, **named)

    return checked


def list_flags(choices: Mapping[str, Sequence[str]]) -> str:
    """Write flags and their choices as LIST_FLAGS prints them."""
    return "\n".join(" ".join([flag, *values]) for flag, values in choices.items())


def _remedy(name: str, known: Collection[str]) -> str | None:
    """Write what to use in place of a name, with flags as on the command line; None if nothing is known."""
    plain = plain_name(name)
    as_given = name.lstrip("-").replace("_", "-")
    ours = next((_OURS[each] for each in (as_given, plain, plain.rpartition(".")[2]) if each in _OURS), ())
    for remedy in ours if plain not in known else ():
        first = _FLAG.search(remedy)
        if first is None or plain_name(first[0]) in known:
            return f"use {remedy}"
    # Groups have prefixes: `--width` is meant to be `--model.width`.
    spelled = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    near = nearest(plain, spelled, cutoff=_NEAR)
    return f"did you mean --{spelled[near]}?" if near else None


def _refusal(remedies: Mapping[str, str], noun: str) -> str:
    if len(remedies) == 1:
        ((name, remedy),) = remedies.items()
        return f"{name} is not a {noun} here: {remedy}"
    groups: dict[str, list[str]] = {}
    for name, remedy in remedies.items():
        groups.setdefault(remedy.replace("did you mean ", "use ").rstrip("?"), []).append(name)
    uses = "; ".join(f"for {' and '.join(names)} {remedy}" for remedy, names in groups.items())
    return f"{', '.join(remedies)} are not {noun}s here: {uses}"


def _as_setting(remedy: str) -> str:
    """Write the flags of a remedy as settings are written in files and in Python."""
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), remedy)
