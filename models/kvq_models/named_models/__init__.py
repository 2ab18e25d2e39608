"""Models that have a name: the one that ships with kvq, and public ones that are fetched once into
the user's cache folder."""
