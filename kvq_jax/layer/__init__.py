"""One layer of a cache: its regions, its static plan, its state, and the accumulator of cross-layer
methods."""
