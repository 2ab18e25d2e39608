"""A server with OpenAI's API on one engine: FastAPI in front, one thread that drives the slots
behind."""
