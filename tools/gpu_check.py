"""`benchmarks/gpu_check.py` as a script."""

if __name__ == "__main__":
    from _start import run

    run("benchmarks.gpu_check")
