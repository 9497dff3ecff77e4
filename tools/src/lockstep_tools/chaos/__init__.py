"""Faults on a cluster, under load, and what the clients saw of them."""
