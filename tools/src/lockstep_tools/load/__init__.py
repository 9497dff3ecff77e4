"""The load generator: an OpenAI client, streams with their histories, and the checks of what clients received.

Commands, benchmarks, tests and experiments put load on an endpoint through this package alone.
"""
