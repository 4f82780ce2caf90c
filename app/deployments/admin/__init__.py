"""What an operator makes of all replicas of a model: told to those that run, and learnt by those that start later."""
