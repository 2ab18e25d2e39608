"""Programs for maintainers: they run in a checkout and are not installed."""
