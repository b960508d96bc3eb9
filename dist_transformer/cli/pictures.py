"""Draw the parts of the Transformer, and the attention of a trained model, on one page with PNG files.

dist-transformer pictures --model RUN/model --src-text "A dog runs." --out pictures

OUT/index.html needs no network and no other file. It shows masks, the weights of every layer and head for one sentence
pair, softmax with and without scaling, sinusoids and their rotations, learned positions, schedules, and the cost of
attention. Each picture is also a PNG file in OUT. Without --model, the pictures that need none are made.
"""

import argparse
from pathlib import Path

from dist_transformer.base.errors import say
from dist_transformer.base.files import refuse_content
from dist_transformer.cli.parser import make_parser
from dist_transformer.inference.options import add_direction_options, add_model_option
from dist_transformer.model_folder import read_model_info
from dist_transformer.run.outputs import claim_folder


def main() -> None:
    arguments = parse_arguments()
    claim_folder(arguments.out, "--out", (arguments.model, arguments.learned_model))
    refuse_content(arguments.out)
    # Early, because the imports below take seconds.
    for model in filter(None, (arguments.model, arguments.learned_model)):
        read_model_info(model)

    from dist_transformer.pictures.collection import PictureSettings, make_pictures
    from dist_transformer.pictures.page import write_pictures

    settings = PictureSettings(
        model=arguments.model,
        source=arguments.src_text,
        target=arguments.tgt_text,
        learned_model=arguments.learned_model,
        direction=arguments.direction,
        tags=None if arguments.tag is None else tuple(arguments.tag),
    )
    made = make_pictures(settings)
    say(write_pictures(arguments.out, made.pictures, made.notes))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder to write; it is new or empty")
    add_model_option(parser, required=False)
    parser.add_argument("--src-text", metavar="TEXT", help="sentence that the model reads (required with --model)")
    parser.add_argument("--tgt-text", metavar="TEXT", help="its translation (default: the model's own)")
    parser.add_argument(
        "--learned-model",
        type=Path,
        metavar="MODEL",
        help="model with learned positions (default: the model of --model, if it has them)",
    )
    add_direction_options(parser)
    return parser.parse_args()
