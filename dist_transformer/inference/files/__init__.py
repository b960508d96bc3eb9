"""Translation of files of any size: formats of the output, sealed parts, and resuming."""
