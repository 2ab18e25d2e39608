"""The work of the commands of `kvq`: a module for each command, with `run(options)`."""
