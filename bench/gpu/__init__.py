"""One run on a machine with a GPU: builds, tests and measures, in under four minutes; JSON under bench/results/.

`python -m bench.gpu`. See README.md beside this file.
"""
