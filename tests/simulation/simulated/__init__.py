"""Routers, workers and clients in one process, on virtual time, from one seed. `World` runs it."""
