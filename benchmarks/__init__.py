"""Measurements of speed and size. Results are raw JSON; the tables in results/ are made from it by `python -m benchmarks.results_page`."""
