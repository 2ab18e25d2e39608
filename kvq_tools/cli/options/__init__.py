"""The options of the commands of `kvq`: for each command DESCRIPTION, EPILOG and
`configure(parser)`.

No module here imports JAX, so that help and refusals come at once. The module of the same name in
`kvq_tools.cli.commands` does the work.
"""
