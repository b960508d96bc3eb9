"""`benchmarks/studies/tags_and_terms.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.studies.tags_and_terms")
