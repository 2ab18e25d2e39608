"""`kvq plan`: what each layer and side of a cache costs, how to share a budget out by it, and where
plans are kept."""
