"""Models with a name: the one that ships with kvq, and public ones that are downloaded once into
the user's cache folder."""
