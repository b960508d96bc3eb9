"""Models for other libraries, written only if they agree with ours."""
