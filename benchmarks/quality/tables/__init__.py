"""The comparisons of methods, at equal stored bits or as engines ship them."""
