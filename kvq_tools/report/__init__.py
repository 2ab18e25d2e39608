"""`kvq report`: quality, size, speed and errors of caches, for one model and one text, on one
self-contained page.

Modules:

    schema.py    the numbers of a report, and report.json, which holds all of them
    collect.py   model, text and caches -> numbers
    times.py     times of decode steps
    maps.py      magnitudes of keys and values, and errors, channel by channel
    drawing.py   themes, line styles, PNGs
    quality.py   numbers -> pictures of quality: against size, by position, flips
    cost.py      numbers -> pictures of bytes and times
    heat.py      numbers -> the maps
    page.py      numbers and pictures -> page.html.jinja, filled in
    write.py     all files of a report

Pictures and page depend only on the numbers: `kvq report --from report.json` makes the same page
again.
"""
