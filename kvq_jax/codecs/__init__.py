"""Turn the rows of one side of one layer into stored arrays, and read these for attention."""
