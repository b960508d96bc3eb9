"""`benchmarks/studies/alignments.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.studies.alignments")
