"""`dist_transformer/cli/prepare.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("dist_transformer.cli.prepare")
