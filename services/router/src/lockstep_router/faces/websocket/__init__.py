"""The WebSocket face: OpenAI's API as JSON messages, many requests on one connection, each of which can be resumed."""
