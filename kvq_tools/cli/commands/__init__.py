"""The commands of `kvq`: one module each, with `configure(parser)` and `run(options)`."""
