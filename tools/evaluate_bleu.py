"""`dist_transformer/cli/evaluate.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("dist_transformer.cli.evaluate")
