"""The KV state server: what must outlive a router or a worker, in memory or on Redis.

It keeps journals of streams, sessions, leases and cold KV blocks. It computes nothing and decides nothing
about streams.
"""
