"""Flags of commands that read a model."""

import argparse
from pathlib import Path


def add_model_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--model", type=Path, required=required, metavar="MODEL", help="model folder")


def add_device_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, several_processes: bool = False
) -> None:
    """Add `--device`, an argument of `find_device`.

    Args:
        several_processes: whether the command runs under a launcher.
    """
    devices = "cpu or cuda, or of a single process cuda:N" if several_processes else "cpu, cuda or cuda:N"
    parser.add_argument("--device", metavar="D", help=f"{devices} (default: cuda if there is one)")


def add_direction_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--direction", metavar="SRC-TGT", help="direction, such as en-de (required if the model has several)"
    )
    parser.add_argument(
        "--tag", nargs="+", metavar="TAG", help="tags in front of every source (default: those of the direction)"
    )
