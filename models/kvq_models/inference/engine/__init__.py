"""Many requests through one cache of fixed shape: they come and go, and the compiled programs
stay."""
