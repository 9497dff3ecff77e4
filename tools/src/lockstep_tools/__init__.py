"""The `lockstep` command line, the load generator, and the generators of code and models."""

__version__ = "0.1.0"
