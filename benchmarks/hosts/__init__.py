"""The adapters of kvq_hosts against the hosts' own caches: `python -m benchmarks.hosts`.

host.py        the sizes of the measured models, and what a host does with one of them
in_scan.py     a hand-written scan over layers; the others are the projects of kvq_hosts
measured.py    tokens, errors, bytes and times of one host
report.py      the JSON file and its page
__main__.py    the command
"""
