"""The program `dist-transformer`: one module per command."""
