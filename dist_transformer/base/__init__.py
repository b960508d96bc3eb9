"""Foundation of the package: errors, checks, files that are complete or absent, verified content, compiled sources."""
