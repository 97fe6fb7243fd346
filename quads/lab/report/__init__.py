"""One page of all results. build.py collects them, text.py puts them into sentences, page.py writes the file.

Stop here unless you change how results are shown.
"""
