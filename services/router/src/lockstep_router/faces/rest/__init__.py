"""The REST face: OpenAI's API over HTTP, with server-sent events for streams. `app` has the application."""
