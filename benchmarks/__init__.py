"""Measurements of speed, size and quality.

cpu/              decode attention, decode steps and single parts, timed on a CPU
gpu/              kernels and decode steps on a GPU: gpu.sh runs them all
machine_code/     instructions of the GPU kernels, counted without a GPU
mesh.py           decode steps on virtual devices against one
quality/          predictions through each cache: the papers' tables, and studies of one paper
readme_table.py   the README's table of caches, made from two of quality's reports
soak.py           decode steps without end: memory, and results against a new cache's
report_file.py    the JSON file that each of them writes to results/
results_page.py   the pages in results/, made from those files
resources.py      what a process holds
"""
