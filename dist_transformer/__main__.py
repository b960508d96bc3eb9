"""`python -m dist_transformer COMMAND …`: the program `dist-transformer` when it is not on the PATH."""

if __name__ == "__main__":
    import sys

    # An old Python, which `check_interpreter` refuses, has no such flag.
    if not getattr(sys.flags, "safe_path", False):
        # Under -m it is the current folder, which may be a stranger's: import no modules that lie there.
        del sys.path[0]

    from dist_transformer.runtime.interpreter import check_interpreter

    check_interpreter()

    from dist_transformer.cli.command import main

    main()
