"""The inference worker: one tensor-parallel engine behind gRPC, for any number of routers.

It handles token ids only; text, sessions and the journal of a stream belong to the router.
"""
