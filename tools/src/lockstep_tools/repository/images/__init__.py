"""Container images: wheels fetched on the host from the lock file, then a build that needs no network.

Standard library only. `make wheels`, `make images` and `make push` are the way in; `__main__` is the command behind
them. What goes into an image is decided by its project's dependencies (`catalog`), the lock file (`wheels`) and its
Dockerfile; this package never decides how a running container behaves.
"""
