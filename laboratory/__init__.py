"""Studies that were run once for their result, and what prepares them.

`make lab` runs their tests. Nothing here is installed or type-checked. Numbers are in
laboratory/results.
"""
