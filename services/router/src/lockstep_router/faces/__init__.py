"""The faces of the router: each speaks one protocol to clients.

A face turns a client's request into a `generation` request and writes the answer. It never chooses a worker and never
sees a worker's frames. The protobuf messages that it uses (`Sampling`, `Logprobs`, `ModelCard`) are the project's own
types: all parts of the router share them, and they belong to no transport.
"""
