"""`benchmarks/studies/table3.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.studies.table3")
