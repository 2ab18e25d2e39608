"""The report of `kvq report`: what caches do to one model on one text, as one self-contained page.

schema.py    the numbers of a report, and report.json, which holds all of them
collect.py   model, text and caches -> numbers
times.py     times of decode steps
maps.py      magnitudes of keys and values, and errors, channel by channel
drawing.py   how any picture is drawn: themes, SVG for the page, PNG beside it
quality.py   numbers -> curves and points of quality
cost.py      numbers -> bars of sizes and times
heat.py      numbers -> the maps
page.py      numbers and pictures -> page.html.jinja, filled in
write.py     all files of a report

Pictures and page are made from the numbers alone: `kvq report --from report.json` makes the same page again.
"""
