"""Discrete-event simulation of many engine replicas behind the real routing code; see loadtest/simulate.py."""
