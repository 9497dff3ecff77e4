"""Lockstep's router: OpenAI's API in front of inference workers. A stream continues when its worker is lost.

It owns text, the journal of every stream and the choice of the worker. It never loads a model.

The package imports nothing by itself, so that no module depends on all others. `router.Router`,
`settings.RouterSettings` and `faces.rest.create_app` are what other code starts from.
"""
