"""Kernels compiled for GPUs that are not there: registers, spills and instructions per cached
element of the main loop, on any machine.

`compile` makes PTX with XLA, `sass` turns it into machine code and finds its main loop, `report`
says what the loop costs, `cases` lists the kernels that are watched. Needs the extra `aot`.
"""
