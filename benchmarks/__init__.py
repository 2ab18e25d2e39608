"""Measurements of speed, size and quality.

cpu/              decode attention, decode steps and single parts, timed on a CPU
gpu/              kernels and decode steps on a GPU: gpu.sh runs them all
machine_code/     instructions of the GPU kernels, counted without a GPU
mesh.py           decode steps on virtual devices against one
protocol/         caches compared in equal windows, two readings, three domains
quality/          predictions through each cache at equal bits, on one text
claims.py         the comparative sentences of the README and of docs/papers.md
report_file.py    the JSON file that each of them writes to results/
results_page.py   the pages in results/, made from those files
resources.py      what a process holds
"""
