"""`kvq plan`: measure the cost of each layer and side of a cache, share out a budget by it, and
store plans."""
