"""Faults against a real deployment, judged from outside over HTTP: `python -m loadtest.faults`, docs/reliability.md.

table.py lists the faults, one family of them to a file (signals, deploys, network, ...). runner.py does one run:
streams of every kind (mix.py) and a prober are under way (traffic.py), a fault strikes the site (site.py), and judge.py
holds each answer (answer.py) against that of an undisturbed run. results.py keeps the runs, report.py writes the table.
"""
