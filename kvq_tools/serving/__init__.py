"""A server with OpenAI's API on one engine: FastAPI in front, and one thread behind it that drives
the slots."""
