"""The `kvq` command line. One module for each command; `main` holds the table of them."""
