"""One layer of a cache: its regions, its static plan and state, and the accumulator of cross-layer
methods."""
