"""Measurements of speed, size and quality.

cpu/              decode attention, decode steps and whole requests, timed on a CPU
gpu/              kernels and decode steps on a GPU: gpu.sh runs them all
machine_code/     instructions of the GPU kernels, counted without a GPU
hosts/            kvq's caches in other projects' models, against the projects' own
serving.py        requests through the slots of one engine; serving_start.py: the first answer
faults/           injected faults, and which of them changed an answer
mesh.py           decode steps on virtual devices against one
protocol/         caches compared in equal windows, two readings, three domains
claims.py         the comparative sentences of the README and of docs/papers.md
report_file.py    the JSON file that each of them writes to results/
results_page.py   the pages in results/, made from those files
"""
