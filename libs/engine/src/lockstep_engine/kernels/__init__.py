"""Kernels. Each has a twin in plain torch, which is its oracle and takes its place where it cannot run."""
