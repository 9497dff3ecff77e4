"""OpenAI's Responses API: its requests and answers in terms of `generation`. Nothing is kept between two requests."""
