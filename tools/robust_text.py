"""`benchmarks/studies/robust_text.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.studies.robust_text")
