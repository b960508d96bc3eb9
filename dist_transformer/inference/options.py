"""Command-line options that every decoding command shares."""

import argparse
from pathlib import Path
from typing import Any

import torch

from dist_transformer.inference.beam import BeamSettings
from dist_transformer.inference.translator import BATCH_TOKENS

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help="model folder")


def add_direction_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--direction", metavar="SRC-TGT", help="direction, such as en-de (needed where the model has several)"
    )
    parser.add_argument(
        "--tag", nargs="+", metavar="TAG", help="tags in front of every source (default: those of the direction)"
    )


def add_decoding_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    def option(name: str, text: str, **settings: Any) -> None:
        parser.add_argument(name, help=text, **settings)

    option("--beam", "hypotheses in search; 1 is greedy (default 4)", type=int, default=4, metavar="K")
    option("--length-penalty", "exponent of the length penalty (default 0.6)", type=float, default=0.6, metavar="A")
    option("--max-extra-tokens", "longest output: source tokens + N (default 50)", type=int, default=50, metavar="N")
    option("--precision", "of the model (default fp32)", choices=tuple(PRECISIONS), default="fp32")
    defaults = f"default {BATCH_TOKENS['cpu']} on a CPU, {BATCH_TOKENS['cuda']} on a GPU"
    option("--batch-tokens", f"padded source tokens of a batch times beam ({defaults})", type=int, metavar="N")


def beam_settings(arguments: argparse.Namespace, *, nbest: int = 1) -> BeamSettings:
    return BeamSettings(
        beam_size=arguments.beam,
        length_penalty=arguments.length_penalty,
        max_extra_tokens=arguments.max_extra_tokens,
        nbest=nbest,
    )
