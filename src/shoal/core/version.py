"""The version of this package, for pyproject.toml and for files that outlive it."""

VERSION = "0.1.0"
