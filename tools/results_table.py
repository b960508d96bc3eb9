"""`benchmarks/results_table.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.results_table")
