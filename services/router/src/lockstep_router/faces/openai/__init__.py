"""OpenAI's API without a transport: its bodies become generation requests, and its answers are made. For all faces."""
