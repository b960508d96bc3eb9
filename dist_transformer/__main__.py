"""`python -m dist_transformer COMMAND …`: the program `dist-transformer` when it is not on the PATH."""

if __name__ == "__main__":
    from dist_transformer.runtime.search_path import leave_current_folder

    leave_current_folder()

    from dist_transformer.runtime.interpreter import share_cores

    share_cores()

    from dist_transformer.cli.command import main

    main()
