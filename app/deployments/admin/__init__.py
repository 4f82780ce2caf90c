"""The operator's changes to all replicas of a model: told to those that run, and learnt by those that start later."""
