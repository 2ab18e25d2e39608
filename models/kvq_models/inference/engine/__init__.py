"""Serve many requests through one cache of fixed shape. Requests come and go, and the compiled
programs stay."""
